"""Fits the H20 profile to four of Table 3's makespans, and shows the rows that the fit did not see.

    python benchmarks/fit_h20.py

What is fitted are compute efficiency and the costs of a step and of a call in it; the fields are printed as
`simulate/profiles.yaml` has them. Real runs are fitted to by `efficient-lmcache simulate --fit-to`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from efficient_lmcache.core.references import Floats
from efficient_lmcache.simulate.costs import ModelShape, costs
from efficient_lmcache.simulate.fit import least_squares
from efficient_lmcache.simulate.paper import MODELS, row_ratios, table_rows, workload_of
from efficient_lmcache.simulate.paper_order import FITTED_SEED
from efficient_lmcache.simulate.profiles import Profile, load_profile

_FIELDS = ("step_s", "sequence_s", "compute_efficiency")
#: Rows of Table 3: recompute, 10 and 20 GiB at A = 16, recompute at A = 8.
_FITTED_ROWS = (0, 3, 4, 14)


def main() -> None:
    profile, rows = load_profile("h20"), range(len(table_rows("table3")))
    start = np.log([getattr(profile, name) for name in _FIELDS])
    found = _with_costs(profile, least_squares(lambda at: _missed(_with_costs(profile, at), _FITTED_ROWS), start))
    for name in _FIELDS:
        print(f"  {name}: {getattr(found, name):.3g}")
    for row, missed in zip(rows, _missed(found, rows), strict=True):
        print(f"{'fitted' if row in _FITTED_ROWS else 'not seen':<9}row {row + 1:<4}makespan {np.exp(missed) - 1:+.1%}")


def _with_costs(profile: Profile, logarithms: Floats) -> Profile:
    return profile.with_costs(dict(zip(_FIELDS, np.exp(logarithms).tolist(), strict=True)))


def _missed(profile: Profile, rows: Sequence[int]) -> Floats:
    """Logarithms of simulated over published makespans."""
    workload, made = workload_of(FITTED_SEED), costs(profile, ModelShape.of(MODELS["moe"]), 8)
    logarithms: Floats = np.log([row_ratios(workload, row, made)[1] for row in rows])
    return logarithms


if __name__ == "__main__":
    main()
