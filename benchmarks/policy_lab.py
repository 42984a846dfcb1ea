"""The policy laboratory's table and figures: every rule in tiers from ample to small, on recorded agents.

    zcat DATA/traces/swebench-verified-mini-swe-agent.jsonl.gz | sed -n 300,359p > whole.jsonl
    efficient-lmcache trace import whole.jsonl --tokenizer tekken --vocab 16384 --out whole.trace
    python benchmarks/policy_lab.py --data DATA --miniature runs/miniature/agents.trace --whole whole.trace \
        --out policies.json --figures docs/images [--study NAME ...] [--processes 2]

DATA holds traces/ with the recordings. Rows that the output file already has are not simulated again; a file from other
code must be removed first. Some twenty minutes of one core.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from rich.progress import Progress

from efficient_lmcache.simulate.costs import Costs, ModelShape, costs
from efficient_lmcache.simulate.deployment import Deployment
from efficient_lmcache.simulate.engine import EngineSettings
from efficient_lmcache.simulate.laboratory import (
    BASELINES,
    CLAIRVOYANT,
    GAMMAS,
    RECOMMENDED,
    RULES,
    Row,
    Study,
    Verdict,
    first_sessions,
    measure,
    verdicts,
    with_intervals,
)
from efficient_lmcache.simulate.paper import MODELS, h20_deployment
from efficient_lmcache.simulate.paper_workload import paper_workload, published
from efficient_lmcache.simulate.profiles import load_profile
from efficient_lmcache.simulate.simulation import Pool
from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.workload import Workload, open_workload

# The paper's A N / K_G on 8 x H20 (16 agents, 33,234 and 343,408 tokens).
GAMMA_G = 1.55
RANKS = 8
_BLOCKS = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--miniature", type=Path, required=True)
    parser.add_argument("--whole", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--study", action="append", choices=list(STUDIES))
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    rows = _read(arguments.out)
    done = {(row.study, row.gamma_h, row.rule) for row in rows}
    names = arguments.study or list(STUDIES)
    wanted = [(name, gamma_h) for name in names for gamma_h in GAMMAS]
    missing = [(*cell, [rule for rule in rules_of(*cell) if (*cell, rule) not in done]) for cell in wanted]
    missing = [cell for cell in missing if cell[2]]
    with Progress() as progress, multiprocessing.get_context("spawn").Pool(arguments.processes) as workers:
        bar = progress.add_task("tiers", total=len(missing))
        for made in workers.imap_unordered(partial(_tier, arguments), missing):
            rows += made
            _write(arguments.out, rows)
            progress.advance(bar)
    print(table(rows))
    print(f"\n{makespan_table(rows)}\n\n{verdict_table(rows)}")
    if arguments.figures:
        draw(rows, arguments.figures)


def rules_of(study: str, gamma_h: float) -> Sequence[str]:
    """All in the smallest workload; elsewhere what is drawn in two tiers, and what the verdict needs in the others."""
    if study == "miniature" or (study, gamma_h) == ("swe-bench", 1.4):
        return RULES
    if gamma_h in (1.4, 4.0):
        return tuple(_COLOURS)
    return (*BASELINES, "exclusive", RECOMMENDED, *([CLAIRVOYANT] if gamma_h == 0.8 else []))


def _tier(arguments: argparse.Namespace, cell: tuple[str, float, Sequence[str]]) -> list[Row]:
    name, gamma_h, rules = cell
    if name not in _made:
        _made.clear()
        _made[name] = STUDIES[name](arguments)
    return [measure(_made[name], gamma_h, rule) for rule in rules]


_made: dict[str, Study] = {}


def miniature(arguments: argparse.Namespace) -> Study:
    """docs/results.md's miniature: the first calls of 79 SWE-bench tasks on two CPU cores."""
    workload = open_workload(arguments.miniature, 256, gpu_block_tokens=128, most_block_references=_BLOCKS)
    shape = ModelShape.of(MODELS["moe"])
    deployment = Deployment(
        EngineSettings(61_440, 16, 2048, plans_ahead=False),
        costs(load_profile("cpu"), shape, 1),
        1024,
        Pool(16, time_scale=0.1),
    )
    return Study("miniature", workload, deployment, Admission("none", activity_window_s=10.0))


def whole(arguments: argparse.Namespace) -> Study:
    """48 whole SWE-bench tasks, another pool, eight H20s."""
    workload = open_workload(arguments.whole, 1024, gpu_block_tokens=128, most_block_references=_BLOCKS)
    return _on_h20("swe-bench", first_sessions(workload, 48), 12)


def weka(arguments: argparse.Namespace) -> Study:
    """The first 16 Weka sessions: long contexts, minutes to an hour between some calls."""
    with (
        gzip.open(arguments.data / "traces/agentic-weka.jsonl.gz", "rt") as sessions,
        tempfile.NamedTemporaryFile("wt", suffix=".jsonl") as first,
    ):
        first.writelines(islice(sessions, 16))
        first.flush()
        workload = open_workload(first.name, 1024, gpu_block_tokens=256, most_block_references=_BLOCKS)
    return _on_h20("weka", workload, 8)


def mooncake(kind: str, arguments: argparse.Namespace) -> Study:
    """The first 100 conversations of three requests or more, as agents in a closed loop."""
    path = arguments.data / f"traces/mooncake-{kind}.jsonl.gz"
    recorded = open_workload(path, 1024, gpu_block_tokens=512, most_block_references=_BLOCKS)
    return _on_h20(f"mooncake-{kind}", first_sessions(with_intervals(recorded), 100, least_calls=3), 16)


def paper(arguments: argparse.Namespace) -> Study:
    """The first 32 of the paper's 79 tasks as fitted to its published sums, on its eight H20s."""
    serving = published()["serving"]
    workload = Workload.of(paper_workload(), serving["chunk_tokens"], "paper")
    return Study("paper", first_sessions(workload, 32), h20_deployment(16), Admission("none"))


STUDIES: dict[str, Callable[[argparse.Namespace], Study]] = {
    "miniature": miniature,
    "swe-bench": whole,
    "weka": weka,
    "mooncake-conversation": partial(mooncake, "conversation"),
    "mooncake-synthetic": partial(mooncake, "synthetic"),
    "paper": paper,
}


def _on_h20(name: str, workload: Workload, active_pool: int) -> Study:
    shape = ModelShape.of(MODELS["moe"])
    made: Costs = costs(load_profile("h20"), shape, RANKS)
    longest = int((workload.blocks.prompt_tokens + workload.blocks.output_tokens).max())
    gpu_kv_tokens = max(int(active_pool * workload.mean_prompt_tokens / GAMMA_G), longest + 8192)
    deployment = Deployment(
        EngineSettings(gpu_kv_tokens, 16, 8192),
        made,
        shape.footprint.bytes_per_token_per_rank(RANKS),
        Pool(active_pool),
    )
    return Study(name, workload, deployment, Admission("none"))


def _read(path: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def _write(path: Path, rows: list[Row]) -> None:
    order = {rule: place for place, rule in enumerate(RULES)}
    names = list(STUDIES)
    rows.sort(key=lambda row: (names.index(row.study), row.gamma_h, order[row.rule]))
    lines = ",\n".join(json.dumps(row.to_json()) for row in rows)
    path.write_text(f'{{"rows": [\n{lines}\n]}}\n')


def table(rows: list[Row]) -> str:
    """Computed prefill in M tokens, and what was stored behind it, as Markdown."""
    lines = []
    for study in dict.fromkeys(row.study for row in rows):
        cells = {(row.rule, row.gamma_h): row for row in rows if row.study == study}
        lines += [f"\n**{study}**\n", "| γ_H | " + " | ".join(f"{gamma:g}" for gamma in GAMMAS) + " |"]
        lines.append("|---" * (len(GAMMAS) + 1) + "|")
        for rule in RULES:
            values = [_cell(cells.get((rule, gamma_h))) for gamma_h in GAMMAS]
            if any(values):
                lines.append(f"| {rule} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.computed_prefill_tokens / 1e6:.2f} <sub>{row.stored_tokens_per_rank / 1e6:.1f}</sub>"


def makespan_table(rows: list[Row]) -> str:
    """Makespans in minutes, as Markdown."""
    shown = {0.57, 1.4, 4.0}
    rules = [rule for rule in _COLOURS if rule not in ("server-lazy", CLAIRVOYANT)]
    lines = ["| workload | γ_H | " + " | ".join(rules) + " |", "|---" * (len(rules) + 2) + "|"]
    minutes = {(row.study, row.gamma_h, row.rule): row.makespan_s / 60 for row in rows}
    for study, gamma_h in dict.fromkeys((row.study, row.gamma_h) for row in rows if row.gamma_h in shown):
        cells = [f"{minutes[study, gamma_h, rule]:.1f}" if (study, gamma_h, rule) in minutes else "" for rule in rules]
        lines.append(f"| {study} | {gamma_h:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict_table(rows: list[Row]) -> str:
    """The recommended rule's computed prefill against the others', as Markdown; bold where it misses what was asked."""
    lines = ["| workload | against | " + " | ".join(f"{gamma:g}" for gamma in GAMMAS) + " |"]
    lines.append("|---" * (len(GAMMAS) + 2) + "|")
    found = {(verdict.study, verdict.gamma_h): verdict for verdict in verdicts(rows)}
    for study in dict.fromkeys(row.study for row in rows):
        for name, field in (("best of the three", "to_best"), ("conditioned", "to_conditioned"), ("bound", "to_bound")):
            cells = [_change(found.get((study, gamma_h)), field) for gamma_h in GAMMAS]
            lines.append(f"| {study if field == 'to_best' else ''} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _change(verdict: Verdict | None, field: str) -> str:
    if verdict is None:
        return ""
    if getattr(verdict, field) is None:
        return ""
    text = f"{getattr(verdict, field) - 1:+.0%}".replace("-", "−")
    return text if verdict.holds or field == "to_bound" else f"**{text}**"


_COLOURS = {
    "none": "#9a9a9a",
    "fixed": "#c9a227",
    "conditioned": "#b5462f",
    "server-lazy": "#7a6fb0",
    "exclusive": "#6fae6f",
    RECOMMENDED: "#1f5f8b",
    CLAIRVOYANT: "#202020",
}


def draw(rows: list[Row], directory: Path) -> None:
    """policies-computed.png and policies-writes.png."""
    from matplotlib import pyplot

    studies = list(dict.fromkeys(row.study for row in rows))
    directory.mkdir(parents=True, exist_ok=True)
    figure, grid = pyplot.subplots(2, -(-len(studies) // 2), figsize=(4 * -(-len(studies) // 2), 7), squeeze=False)
    for axes, study in zip(grid.flat, studies, strict=False):
        for rule, colour in _COLOURS.items():
            mine = sorted(row for row in rows if (row.study, row.rule) == (study, rule))
            axes.plot(
                [row.gamma_h for row in mine],
                [row.computed_prefill_tokens / 1e6 for row in mine],
                color=colour,
                marker="o",
                markersize=3,
                linewidth=2.6 if rule == RECOMMENDED else 1.4,
                linestyle="--" if rule == CLAIRVOYANT else "-",
                label=rule,
            )
        axes.axvspan(0.8, 1.6, color="#000000", alpha=0.05)
        axes.set(title=study, xlabel="γ_H", xscale="log", ylim=(0, None))
        axes.set_xticks([0.3, 0.57, 1, 1.6, 3], ["0.3", "0.57", "1", "1.6", "3"])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("computed prefill, M tokens")
    for axes in list(grid.flat)[len(studies) :]:
        axes.set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.legend(*grid.flat[0].get_legend_handles_labels(), frameon=False, ncols=len(_COLOURS), loc="upper center")
    figure.savefig(directory / "policies-computed.png", dpi=110)
    _draw_writes(rows, studies, directory)


def _draw_writes(rows: list[Row], studies: list[str], directory: Path) -> None:
    """Computed and stored tokens at one pressure: what a rule buys, and with how many writes."""
    from matplotlib import pyplot

    shown, gamma_h = studies[:4], 1.4
    figure, grid = pyplot.subplots(1, len(shown), figsize=(2 + 2.6 * len(shown), 4.2), squeeze=False, sharey=True)
    places = {rule: place for place, rule in enumerate(reversed(RULES))}
    for axes, study in zip(grid.flat, shown, strict=True):
        mine = [row for row in rows if (row.study, row.gamma_h) == (study, gamma_h)]
        height = [places[row.rule] for row in mine]
        colours = [_COLOURS.get(row.rule, "#d8b4a0") for row in mine]
        axes.barh(height, [row.computed_prefill_tokens / 1e6 for row in mine], color=colours, label="computed")
        stored = [row.stored_tokens_per_rank / 1e6 for row in mine]
        axes.plot(stored, height, "o", markerfacecolor="white", markeredgecolor="#202020", label="stored")
        axes.set(title=f"{study}, γ_H {gamma_h:g}", xlabel="M tokens", xlim=(0, None))
        axes.set_yticks(list(places.values()), list(places))
        axes.spines[["top", "right"]].set_visible(False)
    grid.flat[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(directory / "policies-writes.png", dpi=110)


if __name__ == "__main__":
    main()
