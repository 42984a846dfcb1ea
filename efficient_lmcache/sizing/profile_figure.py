"""A profile as a picture."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from efficient_lmcache.core.references import Ints
from efficient_lmcache.sizing.profile import Profile

_REPEATED, _NEW, _OUTPUT = "#4c78a8", "#f58518", "#54a24b"
_FEWEST_LANES = 5  # quantiles over fewer lanes are noise


def draw(profile: Profile, out: Path) -> None:
    """Write the figure: lanes, lengths, growth over a lane, and what repeats. ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--figure needs the package matplotlib: install efficient-lmcache[sizing]") from error
    figure = Figure(figsize=(11, 7), layout="constrained")
    (lanes, lengths), (growth, repeats) = figure.subplots(2, 2)
    _draw_lanes(lanes, profile)
    _draw_lengths(lengths, profile)
    _draw_growth(growth, profile)
    _draw_repeats(repeats, profile)
    figure.suptitle(f"{profile.name}: {len(profile.lane):,} calls in {len(profile.calls_per_lane):,} lanes")
    figure.savefig(out, dpi=150)


def _draw_lanes(axes: Any, profile: Profile) -> None:
    calls = profile.calls_per_lane
    bins = np.unique(np.geomspace(calls.min(), calls.max() + 1, 30).astype(np.int64))
    axes.hist(calls, bins=bins, color=_REPEATED)
    axes.axvline(calls.mean(), color="black", linewidth=1, label=f"mean {calls.mean():.1f}")
    axes.set(xscale="log", xlabel="calls per lane", ylabel="lanes", title="Lanes (tasks)")
    axes.legend()


def _draw_lengths(axes: Any, profile: Profile) -> None:
    for name, tokens, color in (
        ("prompt", profile.prompt_tokens, _REPEATED),
        ("output", profile.output_tokens, _OUTPUT),
        ("beyond cache-stable", profile.prompt_tokens - profile.cache_stable_tokens, _NEW),
    ):
        if tokens.any():
            ordered = np.sort(np.maximum(tokens, 1))
            axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), color=color, label=name)
    axes.set(xscale="log", xlabel="tokens per call", ylabel="share of calls", ylim=(0, 1), title="Lengths")
    _legend_below(axes)
    axes.grid(alpha=0.3)


def _draw_growth(axes: Any, profile: Profile) -> None:
    places = profile.places()
    last = int((np.bincount(places) >= min(_FEWEST_LANES, len(profile.calls_per_lane))).sum())
    order = np.argsort(places, kind="stable")
    begins = np.searchsorted(places[order], np.arange(last + 1))

    def quantiles(tokens: Ints, share: float) -> list[float]:
        groups = (tokens[order[begin:end]] for begin, end in pairwise(begins))
        return [float(np.quantile(group, share)) / 1000 for group in groups]

    calls = np.arange(1, last + 1)
    low, high = (quantiles(profile.prompt_tokens, share) for share in (0.1, 0.9))
    axes.fill_between(calls, low, high, color=_REPEATED, alpha=0.2, label="p10 to p90")
    axes.plot(calls, quantiles(profile.prompt_tokens, 0.5), color=_REPEATED, label="median")
    stable = quantiles(profile.cache_stable_tokens, 0.5)
    axes.plot(calls, stable, color="black", linestyle=":", label="median cache-stable")
    axes.set(xlabel="call of its lane", ylabel="thousand prompt tokens", title="Growth", ylim=(0, None))
    _legend_below(axes)
    axes.grid(alpha=0.3)


def _draw_repeats(axes: Any, profile: Profile) -> None:
    facts = profile.facts()
    prompt, stable = facts["shared_prefix"]["previous_prompt_share"], facts["shared_prefix"]["cache_stable_share"]
    reused = facts["new_kv"]["reused_by_next_call_share"]
    chunks = facts["chunks"]["in_several_sessions_share"]
    rows = {
        "new KV: shared by\nthe lane's next call": [(reused, _REPEATED), (1 - reused, _NEW)],
        "prompts: in the\nprevious call": [(prompt, _REPEATED), (stable - prompt, _OUTPUT), (1 - stable, _NEW)],
    }
    if chunks is not None:
        rows = {"distinct chunks:\nin several sessions": [(chunks, _REPEATED), (1 - chunks, _NEW)], **rows}
    for row, parts in enumerate(rows.values()):
        left = 0.0
        for share, color in parts:
            axes.barh(row, share, left=left, color=color)
            left += share
        axes.text(0.02, row, f"{1 - parts[-1][0]:.1%}", va="center", color="white", weight="bold")
    axes.set_yticks(range(len(rows)), list(rows))
    bound = "" if profile.exact else " (at least: whole blocks, no outputs)"
    axes.set(xlim=(0, 1), xlabel="share", title=f"What repeats{bound}")
    labels = {_REPEATED: "repeats", _OUTPUT: "repeats the output", _NEW: "does not"}
    _legend_below(axes, handles=[_patch(color, label) for color, label in labels.items()])


def _legend_below(axes: Any, **options: Any) -> None:
    """Where it hides no curve."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=3, frameon=False, fontsize="small", **options)


def _patch(color: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)
