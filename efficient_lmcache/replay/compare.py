"""Several runs of one trace side by side: text, Markdown or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efficient_lmcache.replay.options import with_defaults
from efficient_lmcache.replay.rundir import SIMULATED, read_record, run_directories

FORMATS = ("table", "markdown", "json")
# The order in which the paper's figures show them.
_ADMISSION_ORDER = {"recompute": 0, "none": 1, "fixed": 2, "conditioned": 3}
# What a comparison is about, where its files are, and what `_require_same_trace` and the tier's size check.
_COMPARED_OPTIONS = (
    "activity_window_s",
    "admission",
    "connector",
    "host_gib",
    "occupancy_threshold",
    "out",
    "trace",
    "write_threshold_chunks",
)
# Connectors that are said beside the admission.
_SAID = {"lmcache": "LMCache", SIMULATED: SIMULATED}
_COLUMNS = (
    "run",
    "γ_H",
    "tier MiB",
    "admission",
    "computed prefill",
    "prefill ÷ offload",
    "stored",
    "restored",
    "declined",
    "makespan s",
    "time ÷ offload",
    "exact",
    "errors",
)


class CompareError(ValueError):
    """The runs cannot be compared."""


def compare(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """One row per run, small tiers (large gamma_H) first after `recompute`.

    `…_to_offload` are ratios to the run with admission `none` of the same tier, pool and other options, where there is
    one: with our connector if there are two. Only complete runs have them, and are what they refer to.

    Args:
        runs: run directories, sweeps', or directories of runs.

    Raises:
        CompareError: no runs, or runs of different traces.
        RunDirectoryError: a directory without a readable record.
    """
    if not runs:
        raise CompareError("name at least one run directory")
    rows = [_row(path, read_record(path)) for each in runs for path in run_directories(each)]
    _require_same_trace(rows)
    rows.sort(key=lambda row: (row["host_gib_per_rank"], _ADMISSION_ORDER[row["admission"]], row["connector"]))
    for row in rows:
        offload = _offload_of(row, rows) if row["status"] == "complete" else None
        for name in ("computed_prefill_tokens", "makespan_s"):
            row[f"{name}_to_offload"] = _ratio(row[name], offload[name] if offload else None)
    return rows


def render(rows: Sequence[dict[str, Any]], format_: str) -> str:
    """`rows` of `compare` in one of FORMATS."""
    if format_ == "json":
        return json.dumps(list(rows), indent=2)
    table = [list(_COLUMNS), *map(_cells, rows)]
    if format_ == "markdown":
        rule = ["---", *["---:"] * (len(_COLUMNS) - 1)]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in [table[0], rule, *table[1:]])
    if format_ == "table":
        widths = [max(len(cells[i]) for cells in table) for i in range(len(_COLUMNS))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table]
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
    raise CompareError(f"format is {format_!r}; allowed: {', '.join(FORMATS)}")


def _require_same_trace(rows: Sequence[dict[str, Any]]) -> None:
    if len(rows) == 1:
        return
    for row in rows:
        if row["trace_sha256"] is None:
            raise CompareError(f"{row['run']} has nothing to compare: {row['error']}")
    for row in rows[1:]:
        if row["trace_sha256"] != rows[0]["trace_sha256"]:
            replayed = (f"{r['run']} replayed {r['trace_name']} ({r['trace_sha256'][:12]}…)" for r in (row, rows[0]))
            raise CompareError(f"{', '.join(replayed)}: only runs of one trace compare")


def _row(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    copied = (
        "status",
        "error",
        "admission",
        "connector",
        "mode",
        "host_gib_per_rank",
        "active_pool",
        "calls",
        "outputs_exact",
        "errors",
        "skipped",
        "computed_prefill_tokens",
        "stored_tokens_per_rank",
        "restored_tokens_per_rank",
        "preemptions",
        "makespan_s",
    )
    return {
        "run": str(path),
        "trace_name": record["trace"]["name"],
        "trace_sha256": record["trace"]["sha256"],
        **{name: record[name] for name in copied},
        "options": record["options"],
        "gamma_h": record["working_set"]["gamma_h"],
        "declined": record["decisions"]["declined"],
        "decisions": record["decisions"]["total"],
    }


def _offload_of(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    bases = [
        other
        for other in rows
        if other["status"] == "complete"
        and other["admission"] == "none"
        and other["host_gib_per_rank"] == row["host_gib_per_rank"]
        and _conditions(other) == _conditions(row)
    ]
    return min(bases, key=lambda other: other["connector"] != "efficient", default=None)


def _conditions(row: dict[str, Any]) -> dict[str, Any]:
    """What two runs must have in common for their ratio to mean anything, beside trace and tier."""
    return {name: value for name, value in with_defaults(row["options"]).items() if name not in _COMPARED_OPTIONS}


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _cells(row: dict[str, Any]) -> list[str]:
    parts = [_SAID[row["connector"]]] if row["connector"] in _SAID else []
    parts += [row["mode"]] if row["mode"] == "server" else []
    parts += ["lazy"] if row["mode"] == "server" and row["options"].get("lazy_offload") else []
    admission = f"{row['admission']} ({', '.join(parts)})" if parts else row["admission"]
    if row["status"] != "complete":
        admission += f" [{row['status']}]"
    return [
        Path(row["run"]).name,
        _text(row["gamma_h"], "{:.2f}"),
        _text(row["host_gib_per_rank"] * 1024 or None, "{:.0f}"),
        admission,
        _millions(row["computed_prefill_tokens"]),
        _text(row["computed_prefill_tokens_to_offload"], "{:.2f}"),
        _millions(row["stored_tokens_per_rank"]),
        _millions(row["restored_tokens_per_rank"]),
        f"{row['declined']}/{row['decisions']}" if row["decisions"] else "–",
        _text(row["makespan_s"], "{:.1f}"),
        _text(row["makespan_s_to_offload"], "{:.2f}"),
        f"{row['outputs_exact']}/{row['calls']}",
        str(row["errors"]) + (f" + {row['skipped']} skipped" if row["skipped"] else ""),
    ]


def _text(value: float | None, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)


def _millions(tokens: int | None) -> str:
    return "–" if tokens is None else f"{tokens / 1e6:.3f} M"
