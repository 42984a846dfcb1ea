"""`efficient-lmcache record`: a proxy that records live agents into a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from efficient_lmcache.replay.cli_common import check_output, user_errors
from efficient_lmcache.replay.preflight import read_model
from efficient_lmcache.replay.recorder import service
from efficient_lmcache.replay.recorder.privacy import MAX_VOCAB_SIZE
from efficient_lmcache.replay.recorder.recorder import RecordOptions
from efficient_lmcache.replay.recorder.service import RecordOptionError
from efficient_lmcache.replay.trace import TraceReader

NOTHING_RECORDED_STATUS = 1


def record(
    out: Annotated[Path, typer.Option(help="Where to write the trace; its journal lies beside it until then.")],
    upstream: Annotated[str | None, typer.Option(metavar="URL", help="The vLLM server, without /v1.")] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where agents reach the proxy.")] = "127.0.0.1:8001",
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Token ids are below it; by default the highest recorded one decides.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Model directory that knows the vocabulary's size.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Replace ids and tasks' names by pseudonyms.")] = False,
    finish: Annotated[bool, typer.Option("--finish", help="Record nothing; make the trace of a journal.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing trace.")] = False,
) -> None:
    """Record live agents: an OpenAI-compatible proxy in front of vLLM that writes a trace.

    Ctrl-C ends the recording and makes the trace. After a kill, the same command goes on with the journal.
    """
    console = Console(stderr=True)
    with user_errors():
        check_output(out, force)
        if not finish:
            if upstream is None:
                raise RecordOptionError("--upstream is missing; it names the server, as in http://127.0.0.1:8000")
            service.check_upstream(upstream)
            service.listen_address(listen)
            service.record(upstream, listen, _options(out, vocab_size, model, private), console)
        recorded = service.finish(out, console)
        if recorded:
            with TraceReader(out) as trace:
                totals = trace.totals
            typer.echo(f"{out}: {totals.tasks} tasks, {totals.calls} calls, {totals.prompt_tokens:,} prompt tokens")
    if not recorded:
        raise typer.Exit(NOTHING_RECORDED_STATUS)


def _options(out: Path, vocab_size: int | None, model: Path | None, private: bool) -> RecordOptions:
    if vocab_size is not None and model is not None:
        raise RecordOptionError("--vocab-size and --model both say the vocabulary's size; give one")
    tokenizer = None
    if model is not None:
        vocab_size, tokenizer = read_model(model).vocab_size, model.resolve().name
    if private and vocab_size is None:
        raise RecordOptionError("--private needs the vocabulary's size: give --vocab-size or --model")
    if vocab_size is not None and vocab_size > MAX_VOCAB_SIZE:
        raise RecordOptionError(f"--vocab-size is {vocab_size}; it must be at most {MAX_VOCAB_SIZE}")
    return RecordOptions(out, vocab_size, tokenizer, private)
