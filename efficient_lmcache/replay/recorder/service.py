"""A recording from its first call to its trace: the proxy served until a signal ends it, then the trace built."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web
from rich.console import Console

from efficient_lmcache.replay.open_files import allow_open_files
from efficient_lmcache.replay.progress_bar import progress_bar
from efficient_lmcache.replay.recorder.finish import write_trace
from efficient_lmcache.replay.recorder.journal import journal_path
from efficient_lmcache.replay.recorder.proxy import Proxy
from efficient_lmcache.replay.recorder.recorder import Recorder, RecordOptions, Tally
from efficient_lmcache.replay.signals import on_ending_signal

_GRACE_S = 5.0  # that calls in flight have to end by themselves


class RecordOptionError(ValueError):
    """An option that no recording can be made with."""


def check_upstream(upstream: str) -> None:
    if "@" in upstream:
        raise RecordOptionError("--upstream has a user or password in it; clients send their own credentials")
    try:
        parts = urlsplit(upstream)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query
    except ValueError:  # no port, or no address in brackets
        valid = False
    if not valid:
        raise RecordOptionError(f"--upstream {upstream!r}: must be a URL like http://HOST:PORT")
    if parts.path.rstrip("/").endswith("/v1"):
        raise RecordOptionError(f"--upstream {upstream!r}: without the /v1, which comes with each request")


def listen_address(listen: str) -> tuple[str, int]:
    """HOST and PORT of "HOST:PORT"; port 0 lets the system choose one."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise RecordOptionError(f"--listen {listen!r}: must be HOST:PORT, with a port from 0 to 65535")
    return host.strip("[]"), int(port)


def record(upstream: str, listen: str, options: RecordOptions, console: Console) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. Raises JournalError, or OSError for an address that is in use."""
    allow_open_files()
    recorder = Recorder(options, lambda text: _say(console, text))
    with contextlib.closing(recorder):
        asyncio.run(_serve(upstream, listen_address(listen), recorder, console))


async def _serve(upstream: str, address: tuple[str, int], recorder: Recorder, console: Console) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    with console.status("recording", refresh_per_second=2) as status:
        proxy = Proxy(upstream, recorder, lambda: status.update(progress_text(recorder.tally)))
        runner = proxy.runner(_GRACE_S)
        await runner.setup()
        # Until the last call in flight is written down: a closing terminal sends more than one signal.
        with on_ending_signal(lambda: loop.call_soon_threadsafe(stop.set)):
            try:
                await web.TCPSite(runner, *address).start()
                host, port = runner.addresses[0][:2]
                shown = f"[{host}]" if ":" in host else host
                _say(console, f"recording http://{shown}:{port} -> {upstream}; Ctrl-C ends it")
                await stop.wait()
            finally:
                await runner.cleanup()


def progress_text(tally: Tally) -> str:
    """How far a recording is, on one line."""
    return (
        f"recording: {tally.calls} calls, {sum(tally.failed.values())} failed, "
        f"{sum(tally.unrecorded.values())} not recorded"
    )


def finish(out: Path, console: Console) -> bool:
    """Build the trace from its journal, and say what is in it; False if no call was recorded."""
    try:
        with progress_bar("writing", "tasks") as progress:
            tally = write_trace(out, progress)
    except (OSError, KeyboardInterrupt) as error:
        why, kept = str(error) or "interrupted", journal_path(out).name
        raise RecordOptionError(f"{why}; {kept} is kept, `record --finish` makes the trace of it") from error
    for kind, reasons in (("failed or were aborted", tally.failed), ("are not recorded", tally.unrecorded)):
        for reason, count in reasons.most_common():
            _say(console, f"{count} calls {kind}: {reason}")
    if not tally.calls:
        _say(console, "no call was recorded, so there is no trace")
    return tally.calls > 0


def _say(console: Console, text: str) -> None:
    """A line as it is: no width, no markup in what others have named."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)
