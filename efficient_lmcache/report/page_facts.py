"""What was run: the page's title and the facts below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from efficient_lmcache.report.analyses import Analyses
from efficient_lmcache.report.figures import tier_text
from efficient_lmcache.report.markup import element, joined
from efficient_lmcache.report.runs import Inputs


def title(inputs: Inputs) -> str:
    """The sweeps' names, else the traces'."""
    names = [sweep.name for sweep in inputs.sweeps]
    return ", ".join(names or _distinct(run.record["trace"]["name"] for run in inputs.runs)) or "No runs"


def facts(inputs: Inputs, analyses: Analyses) -> tuple[str, list[tuple[str, object]]]:
    """A sentence on the whole, and (name, value) pairs; values that differ between runs are all given."""
    rows = [one.row for one in analyses.runs]
    records = [run.record for run in inputs.runs]
    days = sorted({str(record["started_at"])[:10] for record in records})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else "no day"
    complete = sum(row.status == "complete" for row in rows)
    traces = ", ".join(_distinct(row.trace_name for row in rows))
    finished = "all" if complete == len(rows) else f"{complete} of them"
    lead = f"{len(rows)} runs of {traces}, {finished} complete, {span}."
    sets: dict[tuple[int, float], None] = {}
    for row in rows:
        if row.working_set_gib_per_rank is not None:
            sets.setdefault((row.active_pool, row.working_set_gib_per_rank))
    working = joined(
        (
            element("div", f"{tier_text(gib)} per rank at A\u00a0=\u00a0{pool}")
            for pool, gib in sorted(sets, reverse=True)
        ),
        "",
    )
    pairs: list[tuple[str, object]] = [
        ("Trace", _values(records, _trace)),
        ("Mean prompt N̄", _values(records, _mean_prompt)),
        ("Working set (A − 1) · N̄ · β", working or "–"),
        ("Model", _values(records, lambda record: Path(record["options"]["model"]).name)),
        ("GPU KV capacity K_G", _values(records, _gpu_kv)),
        ("Chunk", _values(records, lambda record: f"{record['options']['chunk_tokens']:,} tokens")),
        ("Recorded pauses", _values(records, lambda record: f"× {record['options']['time_scale']:g}")),
        ("Versions", _values(records, _versions)),
    ]
    return lead, pairs


def _values(records: Iterable[dict[str, Any]], value: Callable[[dict[str, Any]], str | None]) -> object:
    found = _distinct(text for record in records if (text := value(record)))
    return joined((element("div", text) for text in found), "") or "–"


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _trace(record: dict[str, Any]) -> str:
    trace = record["trace"]
    if not trace.get("sha256"):
        return str(trace["name"])
    return (
        f"{trace['name']} ({trace['sha256'][:12]}…): {trace['tasks']:,} tasks, {trace['calls']:,} calls, "
        f"{trace['prompt_tokens'] / 1e6:,.2f} M prompt tokens"
    )


def _mean_prompt(record: dict[str, Any]) -> str | None:
    mean = record["working_set"]["mean_prompt_tokens"]
    return None if mean is None else f"{mean:,.0f} tokens"


def _gpu_kv(record: dict[str, Any]) -> str | None:
    tokens, gamma = record["gpu_kv_tokens"], record["working_set"]["gamma_g"]
    if tokens is None:
        return None
    return f"{tokens:,} tokens" + (
        f" (γ_G {gamma:.2f} at A\u00a0=\u00a0{record['working_set']['pool']})" if gamma else ""
    )


def _versions(record: dict[str, Any]) -> str:
    names = {"efficient_lmcache": "Efficient-LMCache", "vllm": "vLLM", "lmcache": "LMCache"}
    versions = record["versions"]
    return ", ".join(f"{name} {versions[key]}" for key, name in names.items() if versions.get(key))
