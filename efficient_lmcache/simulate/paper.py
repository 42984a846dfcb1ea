"""The paper's runs, simulated on a workload fitted to its published statistics (arXiv:2609.33762v1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from efficient_lmcache.core.references import References
from efficient_lmcache.simulate.costs import Costs, ModelShape, costs
from efficient_lmcache.simulate.deployment import Configuration, Deployment, Simulated, gamma_h, simulate
from efficient_lmcache.simulate.engine import EngineSettings
from efficient_lmcache.simulate.paper_order import FITTED_SEED
from efficient_lmcache.simulate.paper_workload import paper_workload, published
from efficient_lmcache.simulate.profiles import load_profile
from efficient_lmcache.simulate.simulation import Pool
from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.workload import Workload

#: What of the models' public `config.json` the costs depend on.
MODELS: dict[str, dict[str, Any]] = {
    "moe": {  # Qwen3-Coder-30B-A3B-Instruct
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "vocab_size": 151_936,
        "torch_dtype": "bfloat16",
    },
    "dense": {  # Qwen2.5-Coder-32B-Instruct
        "model_type": "qwen2",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 27_648,
        "vocab_size": 152_064,
        "torch_dtype": "bfloat16",
    },
}
TABLES = ("table3",)


def simulate_table(
    name: str, seed: int = FITTED_SEED, progress: Callable[[int, int], None] = lambda done, count: None
) -> list[dict[str, Any]]:
    """Every row of a table as `Simulated.to_json` gives it, with the published numbers of the same names as `paper`.

    Args:
        seed: of the workload.
        progress: called with (rows done, rows in all).

    Raises:
        ValueError: the table is not known.
    """
    if name not in TABLES:
        raise ValueError(f"--paper is {name!r}; it must be one of {', '.join(TABLES)}")
    workload = workload_of(seed)
    rows: list[dict[str, Any]] = []
    done: dict[tuple[int, float, str], Simulated] = {}
    table = table_rows(name)
    for number, (active_pool, configuration) in enumerate(table):
        progress(number, len(table))
        key = (active_pool, configuration.host_gib, configuration.name)
        deployment = h20_deployment(active_pool)
        if key not in done:
            done[key] = simulate(workload, deployment, configuration)
        rows.append(
            {
                "name": published()[name][number]["name"],
                "active_pool": active_pool,
                "gamma_h": gamma_h(workload, deployment, configuration.host_gib),
                **done[key].to_json(),
                "paper": published_row(name, number),
            }
        )
    return rows


def table_rows(name: str) -> list[tuple[int, Configuration]]:
    """A table's pools and configurations, in its order."""
    serving = published()["serving"]
    thresholds = (serving["write_threshold_chunks"], serving["occupancy_threshold"], serving["window_s"])
    return [
        (row["active_pool"], Configuration(float(row["host_gib"]), Admission(row["admission"], *thresholds)))
        for row in published()[name]
    ]


def published_row(name: str, number: int) -> dict[str, Any]:
    """A row's published results, under the names of `Simulated`."""
    row = published()[name][number]
    return {
        "computed_prefill_tokens": round(row["computed_prefill_mtok"] * 1e6),
        "restored_tokens_per_rank": round(row["restored_mtok"] * 1e6),
        "stored_tokens_per_rank": round(row["stored_mtok"] * 1e6),
        "preemptions": row["preemptions"],
        "makespan_s": row["makespan_min"] * 60,
    }


def row_ratios(workload: Workload, number: int, made: Costs | None = None) -> tuple[float, float]:
    """A row of Table 3, simulated over published: computed prefill and makespan.

    Args:
        made: as of `h20_deployment`.
    """
    pool, configuration = table_rows("table3")[number]
    simulated = simulate(workload, h20_deployment(pool, made), configuration)
    paper = published_row("table3", number)
    return (
        simulated.computed_prefill_tokens / paper["computed_prefill_tokens"],
        simulated.makespan_s / paper["makespan_s"],
    )


@cache
def workload_of(seed: int) -> Workload:
    """The fitted workload, as `in_chunks`."""
    return in_chunks(paper_workload(seed))


def in_chunks(blocks: References) -> Workload:
    """A workload in vLLM's blocks of 16 tokens, and in LMCache's chunks of 1,024."""
    return Workload.of(blocks, published()["serving"]["chunk_tokens"], "paper", most_block_references=len(blocks.keys))


def h20_deployment(active_pool: int, made: Costs | None = None) -> Deployment:
    """Table 2's server: vLLM 0.13, which admits a call once its first step fits.

    Args:
        made: costs instead of the profile's.
    """
    serving = published()["serving"]
    shape = ModelShape.of(MODELS["moe"])
    return Deployment(
        EngineSettings(
            serving["gpu_kv_tokens"],
            serving["max_num_seqs"],
            serving["max_num_batched_tokens"],
            reserves_prompt=False,
            plans_ahead=False,
            keyless_first=False,
        ),
        made or costs(load_profile("h20"), shape, serving["tp_ranks"]),
        serving["kv_bytes_per_token_per_rank"],
        Pool(active_pool),
    )
