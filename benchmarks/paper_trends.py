"""Do the paper's other machines follow the simulator? Tables 8 and 11 on the workload fitted to its H20 runs.

    python benchmarks/paper_trends.py [--seed 6]

The paper does not publish those runs' workloads, host tiers and, but for two, GPU KV capacities. So only signs and
slopes can be compared: Table 11's hit rate and time over the GPU memory fraction (RTX 3090), and in Table 8 whether
offload helps (RTX 3090) or hurts (H800), for three tiers. Two minutes on one core; both tables in Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from efficient_lmcache.simulate.costs import ModelShape, costs
from efficient_lmcache.simulate.deployment import Configuration, Deployment, Simulated, gamma_h, simulate
from efficient_lmcache.simulate.paper import MODELS, h20_deployment, workload_of
from efficient_lmcache.simulate.paper_order import FITTED_SEED
from efficient_lmcache.simulate.paper_workload import paper_workload, published
from efficient_lmcache.simulate.profiles import load_profile
from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.workload import Workload

ACTIVE_POOL = 16
GAMMA_H = (2.0, 1.0, 0.5)
_NO_ADMISSION = Admission("none", 8, 0.95, 60.0)
_GIB = 1 << 30
#: Of the memory that an engine may use, neither weights nor KV; what the one published capacity leaves over (Table 2).
_OVERHEAD_GIB = 0.6
_DENSE_CONTEXT_TOKENS = 131_072


@dataclass(frozen=True, slots=True)
class Machine:
    """A deployment of Table 2's lower part.

    Attributes:
        row: as Table 8 names it.
        memory_gib: of a GPU.
        memory_fraction: that the engine may use.
        gpu_kv_tokens: where it is published; else what the fraction leaves.
    """

    row: tuple[str, str]
    profile: str
    model: str
    ranks: int
    weights_gib: float
    memory_gib: float
    memory_fraction: float
    gpu_kv_tokens: int | None = None

    def deployment(self) -> Deployment:
        """With the H20 runs' scheduler."""
        shape = ModelShape.of(MODELS[self.model])
        bytes_per_token = shape.footprint.bytes_per_token_per_rank(self.ranks)
        left_gib = self.memory_fraction * self.memory_gib - self.weights_gib / self.ranks - _OVERHEAD_GIB
        made = h20_deployment(ACTIVE_POOL, costs(load_profile(self.profile), shape, self.ranks))
        tokens = self.gpu_kv_tokens or int(left_gib * _GIB / bytes_per_token)
        return replace(made, engine=replace(made.engine, gpu_kv_tokens=tokens), bytes_per_token=bytes_per_token)


_MOE_GIB, _DENSE_GIB = 56.9, 61.0  # BF16 weights of 30.5 and 32.8 thousand million parameters
_RTX3090 = Machine(("8xRTX3090", "moe"), "rtx3090", "moe", 8, _MOE_GIB, 24.0, 0.65, 345_760)
MACHINES = (
    _RTX3090,
    Machine(("8xRTX3090", "dense"), "rtx3090", "dense", 8, _DENSE_GIB, 24.0, 0.70),
    Machine(("2xH800", "moe"), "h800", "moe", 2, _MOE_GIB, 80.0, 0.65, 480_640),
    Machine(("2xH800", "dense"), "h800", "dense", 2, _DENSE_GIB, 80.0, 0.70),
    Machine(("8xH800", "moe"), "h800", "moe", 8, _MOE_GIB, 80.0, 0.20),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=FITTED_SEED, help="of the workload")
    seed = parser.parse_args().seed
    for line in chain(memory_fractions(workload_of(seed)), [""], offload_ratios(seed)):
        print(line, flush=True)


def tasks_that_fit(seed: int, longest_prompt_tokens: int) -> Workload:
    """The workload's tasks whose prompts all have at most so many tokens."""
    references, chunk_tokens = paper_workload(seed), published()["serving"]["chunk_tokens"]
    longest = np.zeros(int(references.session.max()) + 1, np.int64)
    np.maximum.at(longest, references.session, references.prompt_tokens)
    kept = references.reordered(np.flatnonzero(longest[references.session] <= longest_prompt_tokens))
    return Workload.of(kept, chunk_tokens, "paper", most_block_references=len(kept.keys))


def memory_fractions(workload: Workload) -> Iterator[str]:
    """Table 11."""
    yield "| memory fraction | GPU KV tokens | hit rate: paper → simulated | minutes: paper → simulated |"
    yield "|---|---|---|---|"
    for row in published()["table11"]:
        machine = replace(_RTX3090, memory_fraction=row["gpu_memory_fraction"], gpu_kv_tokens=None)
        deployment = machine.deployment()
        outcome = simulate(workload, deployment, Configuration(0.0, _NO_ADMISSION))
        hit = 1 - outcome.computed_prefill_tokens / outcome.prompt_tokens
        yield (
            f"| {row['gpu_memory_fraction']:.2f} | {deployment.engine.gpu_kv_tokens:,} "
            f"| {row['hit_share']:.1%} → {hit:.1%} | {row['wall_min']} → {outcome.makespan_s / 60:.0f} |"
        )


def offload_ratios(seed: int) -> Iterator[str]:
    """Table 8; the dense model on the tasks that its context holds."""
    workloads = {"moe": workload_of(seed), "dense": tasks_that_fit(seed, _DENSE_CONTEXT_TOKENS)}
    ratios = {(row["gpus"], row["model"]): row["ratio"] for row in published()["table8"]}
    yield f"| machine | GPU KV tokens | paper | {' | '.join(f'γ_H {gamma:g}' for gamma in GAMMA_H)} |"
    yield f"|---|---|---|{'---|' * len(GAMMA_H)}"
    for machine in MACHINES:
        deployment, workload = machine.deployment(), workloads[machine.model]
        alone = simulate(workload, deployment, Configuration(0.0, _NO_ADMISSION))
        of_one_gib = gamma_h(workload, deployment, 1.0)
        assert of_one_gib is not None
        cells = [_ratio(simulate(workload, deployment, _tier(of_one_gib / gamma)), alone) for gamma in GAMMA_H]
        name, tokens = " ".join(machine.row), deployment.engine.gpu_kv_tokens
        yield f"| {name} | {tokens:,} | {ratios[machine.row]} | {' | '.join(cells)} |"


def _tier(host_gib: float) -> Configuration:
    return Configuration(host_gib, _NO_ADMISSION)


def _ratio(offload: Simulated, alone: Simulated) -> str:
    computed = offload.computed_prefill_tokens / alone.computed_prefill_tokens
    return f"{offload.makespan_s / alone.makespan_s:.2f} <sub>{computed:.2f}</sub>"


if __name__ == "__main__":
    main()
