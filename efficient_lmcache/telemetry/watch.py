"""A deployment as a table that fits a terminal of 80 columns."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from efficient_lmcache.telemetry.redis_feed import RedisFeed
from efficient_lmcache.telemetry.status import ClusterStatus, EngineStatus

_REFRESH_S = 0.5
#: Older rows are shown as fading.
_OLD_S = 5.0
#: Of the screen: title, header, rules, pool, how many are left out, notes.
_OTHER_LINES = 12
_NOTHING = Text("–", style="dim")


def table(status: ClusterStatus, max_rows: int | None = None) -> Table:
    """Rows of engines, of which so many are shown, and the pool below them."""
    result = Table(box=box.SIMPLE, show_footer=True, expand=True, pad_edge=False, footer_style="bold")
    pool, engines = status.pool, status.engine_count
    result.add_column("engine", f"pool of {engines}", no_wrap=True, overflow="ellipsis", ratio=1, min_width=10)
    occupancy = f"{status.registered_chunks / status.capacity_chunks:.0%}" if status.capacity_chunks else "–"
    for header, footer in (
        ("rank", ""),
        ("occupancy", occupancy),
        ("evicted", f"{status.evicted_chunks:,}"),
        ("pressure", f"{status.under_pressure} of {engines}"),
        ("A", f"{pool.active_pool:,}"),
        ("N̄", f"{pool.mean_prompt_tokens:,.0f}"),
        ("age", ""),
    ):
        result.add_column(header, footer, justify="right", no_wrap=True)
    for row in status.engines[:max_rows]:
        result.add_row(*_cells(row), style="dim" if row.age_s > _OLD_S else "")
    left_out = len(status.engines) - result.row_count
    if left_out:
        result.add_row(Text(f"… {left_out} more", style="dim"))
    return result


def notes(status: ClusterStatus) -> list[Text]:
    """What the table does not say: why it is empty, and what was ignored."""
    hint = "" if status.engines else "no engine has said anything yet; do they have the same deployment and Redis?"
    bad = f"{status.bad_messages} messages were no telemetry and were ignored" if status.bad_messages else ""
    return [Text(note, style="dim") for note in (hint, bad) if note]


def watch(console: Console, status: Callable[[], ClusterStatus], feed: RedisFeed, title: str) -> None:
    """Shows the newest status until Ctrl-C."""

    def screen() -> RenderableType:
        now = status()
        if feed.connected:
            line = Text(f"{title}", style="bold")
        else:
            line = Text(f"{title}: {feed.error or 'connecting'}; trying again", style="bold red")
        ends = Text("Ctrl-C ends", style="dim")
        return Group(line, table(now, max_rows=max(console.height - _OTHER_LINES, 1)), *notes(now), ends)

    with Live(screen(), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(_REFRESH_S)
            live.update(screen(), refresh=True)


def _cells(row: EngineStatus) -> list[Text]:
    tier, pool = row.tier, row.pool
    pressure = row.seen.pressure if row.seen else None
    return [
        # Nothing that arrives may steer the terminal.
        Text("".join(character if character.isprintable() else "·" for character in row.engine_id)),
        Text(f"{row.rank}"),
        Text(f"{tier.occupancy:.0%}") if tier else _NOTHING,
        Text(f"{tier.evicted_chunks:,}") if tier else _NOTHING,
        _NOTHING if pressure is None else Text("yes", style="yellow") if pressure else Text("no"),
        Text(f"{pool.active_pool:,}") if pool else _NOTHING,
        Text(f"{pool.mean_prompt_tokens:,.0f}") if pool else _NOTHING,
        Text(f"{row.age_s:.0f} s"),
    ]
