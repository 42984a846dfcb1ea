"""Streams of text recordings: mini-swe-agent and OpenHands trajectories, through a tokenizer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efficient_lmcache.core.references import References
from efficient_lmcache.replay.importers.importing import import_recording
from efficient_lmcache.sizing.streams import RecordingError, open_stream

pytest.importorskip("tokenizers", reason="needs the package tokenizers, which the extras cpu and gpu bring")

BPE = "bpe:300"
Row = dict[str, Any]


def mini_swe_agent(name: str, start: int = 100) -> Row:
    usage = {"completion_tokens": 90}

    def said(text: str, created: int) -> Row:
        return {"role": "assistant", "content": text, "extra": {"response": {"created": created, "usage": usage}}}

    first = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": f"Please fix {name}."}]
    return {
        "instance_id": name,
        "messages": [*first, said("ls", start), {"role": "user", "content": "a.py b.py"}, said("done", start + 7)],
    }


def answer(text: str, identifier: str) -> Row:
    """A response as LiteLLM returns it."""
    call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": text})}}
    return {"id": identifier, "choices": [{"message": {"role": "assistant", "content": text, "tool_calls": [call]}}]}


def history(name: str = "a") -> Row:
    """Two calls, the first with two tool calls; an event of bookkeeping between them."""
    first, second = ({"function_name": "bash", "model_response": answer(text, text)} for text in ("ls", "done"))

    def event(second_of_minute: int, source: str, **more: Any) -> Row:
        return {"timestamp": f"2026-01-01T00:00:{second_of_minute:02d}", "source": source, **more}

    return {
        "instance_id": name,
        "history": [
            event(0, "agent", action="system", args={"content": "You fix bugs."}),
            event(1, "user", action="message", args={"content": "Please fix it."}),
            event(5, "agent", action="run", args={"command": "ls"}, tool_call_metadata=first),
            event(5, "agent", action="read", args={"path": "a.py"}, tool_call_metadata=first),
            event(7, "environment", observation="agent_state_changed", content="", extras={}),
            event(8, "environment", observation="run", content="a.py b.py", tool_call_metadata=first),
            event(12, "agent", action="finish", args={}, tool_call_metadata=second),
        ],
    }


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_completions(folder: Path, calls: list[tuple[float, list[Row], Row]]) -> None:
    folder.mkdir(parents=True)
    for number, (timestamp, messages, response) in enumerate(calls):
        record = {"messages": messages, "response": response, "timestamp": timestamp, "cost": 0.0}
        (folder / f"model-{len(calls) - number}.json").write_text(json.dumps(record))


def assert_same_calls(left: References, right: References) -> None:
    for name in ("keys", "offsets", "lookup_chunks", "prompt_tokens", "output_tokens", "lane", "start_s", "interval_s"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)


def test_mini_swe_agent_streams_as_its_imported_trace_does(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "s.jsonl", [mini_swe_agent("a"), mini_swe_agent("b", start=103)])
    import_recording(source, tmp_path / "t.trace", tokenizer=BPE)
    stream = open_stream(source, 4, tokenizer=BPE, with_outputs=True)
    directly = References.concatenate(stream)
    assert_same_calls(directly, References.concatenate(open_stream(tmp_path / "t.trace", 4, with_outputs=True)))
    assert stream.lanes == ["a", "b"]
    assert directly.start_s.tolist() == [0.0, 7.0, 3.0, 10.0]


def test_a_bpe_learns_the_texts_that_an_imports_does(tmp_path: Path) -> None:
    unanswered = {"instance_id": "unanswered", "messages": [{"role": "user", "content": "words of its own " * 99}]}
    source = write_lines(tmp_path / "runs.jsonl", [mini_swe_agent("a"), unanswered])
    import_recording(source, tmp_path / "t.trace", tokenizer=BPE)
    directly = References.concatenate(open_stream(source, 4, tokenizer=BPE))
    assert_same_calls(directly, References.concatenate(open_stream(tmp_path / "t.trace", 4)))


def test_text_without_a_tokenizer_says_which_there_are(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "s.jsonl", [mini_swe_agent("a")])
    with pytest.raises(RecordingError, match="is a recording of text, which needs a tokenizer; allowed are 'tekken'"):
        open_stream(source)


def test_times_that_messages_do_not_tell_are_nan(tmp_path: Path) -> None:
    row = mini_swe_agent("a")
    for message in row["messages"]:
        message.pop("extra", None)
    references = References.concatenate(open_stream(write_lines(tmp_path / "s.jsonl", [row]), tokenizer=BPE))
    np.testing.assert_array_equal(references.interval_s, [0.0, np.nan])


def test_an_openhands_history_has_a_call_for_every_response(tmp_path: Path) -> None:
    stream = open_stream(write_lines(tmp_path / "output.jsonl", [history()]), 4, tokenizer=BPE)
    references = References.concatenate(stream)
    assert stream.lanes == ["a"]
    assert references.interval_s.tolist() == [0.0, 3.0]
    assert stream.shared is not None
    # Nothing is rewritten: the second prompt begins with the first and its whole output.
    assert stream.shared.cache_stable == [0, int(references.prompt_tokens[0] + references.output_tokens[0])]


def test_pauses_do_not_depend_on_the_zone_of_who_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded without a zone in the night in which clocks in Berlin are put forward."""
    row = history()
    for event, at in zip(row["history"][2:], ("01:59:58", "01:59:58", "01:59:59", "03:30:00", "03:30:09"), strict=True):
        event["timestamp"] = f"2026-03-29T{at}"
    source = write_lines(tmp_path / "output.jsonl", [row])
    for zone in ("UTC", "Europe/Berlin"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        references = References.concatenate(open_stream(source, 4, tokenizer=BPE))
        assert references.interval_s.tolist() == [0.0, 5402.0], zone
    monkeypatch.undo()
    time.tzset()


def test_openhands_completions_are_calls_in_time_order(tmp_path: Path) -> None:
    prompt = [
        {"role": "system", "content": "You fix bugs."},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ]
    said = {"role": "assistant", **answer("ls", "1")["choices"][0]["message"]}
    later = [*prompt, said, {"role": "tool", "content": "a.py b.py"}]
    write_completions(
        tmp_path / "llm_completions" / "a", [(1.0, prompt, answer("ls", "1")), (2.0, later, answer("done", "2"))]
    )
    write_completions(tmp_path / "llm_completions" / "b", [(0.5, prompt, answer("ls", "1"))])
    stream = open_stream(tmp_path / "llm_completions", 4, tokenizer=BPE)
    references = References.concatenate(stream)
    assert stream.lanes == ["a", "b"]
    assert references.lane.tolist() == [0, 0, 1]
    assert stream.shared is not None
    assert stream.shared.cache_stable[1] == references.prompt_tokens[0] + references.output_tokens[0]
    assert references.call_keys(0).tolist() == references.call_keys(2).tolist()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"history": {}}, "line 2: history must be a list of objects, not {}"),
        ({"history": [{"source": "agent", "action": "condensation"}]}, r"history\[0\]: is a condensation"),
        (
            {"history": [{"source": "moon", "action": "run"}]},
            r"history\[0\]: source is 'moon'; allowed are agent, user",
        ),
        ({"history": [{"source": "agent", "kind": "x"}]}, r"history\[0\]: is an event of OpenHands' version 1"),
        ({"history": [{"source": "agent", "cause": 1}]}, r"history\[0\]: must have an action or an observation"),
        (
            {"history": [{"source": "user", "action": "message", "args": {"content": 3}}]},
            r"content must be text or a list of text",
        ),
        (
            {"history": [{"source": "user", "action": "message", "args": {"content": "x"}, "timestamp": "now"}]},
            r"history\[0\]: timestamp must be a date and time in ISO format, not 'now'",
        ),
        (
            {"history": [{"source": "agent", "action": "run", "tool_call_metadata": {"model_response": {"id": 1}}}]},
            r"model_response: choices must be a list of objects",
        ),
        (
            {"history": [{"source": "user", "action": "message", "args": {"content": "\ud800"}}]},
            r"history\[0\]: its text is not Unicode",
        ),
        ({"instance_id": ""}, "line 2: instance_id must be a non-empty text"),
    ],
)
def test_bad_histories_are_named_or_counted(change: Row, expected: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "output.jsonl", [history("a"), {**history("b"), **change}, history("c")])
    with pytest.raises(RecordingError, match=expected):
        list(open_stream(path, tokenizer=BPE))
    stream = open_stream(path, tokenizer=BPE, skip_bad=True)
    assert len(References.concatenate(stream)) == 4
    assert (stream.skipped, stream.lanes) == (1, ["a", "c"])


def test_bad_trajectories_are_named_or_counted(tmp_path: Path) -> None:
    bad = {**mini_swe_agent("b"), "messages": [{"role": "moon", "content": ""}]}
    path = write_lines(tmp_path / "s.jsonl", [mini_swe_agent("a"), bad, mini_swe_agent("c")])
    with pytest.raises(ValueError, match=r"line 2: messages\[0\].role is 'moon'"):
        list(open_stream(path, tokenizer=BPE))
    stream = open_stream(path, tokenizer=BPE, skip_bad=True)
    References.concatenate(stream)
    assert (stream.skipped, stream.lanes) == (1, ["a", "c"])


def test_bad_completions_are_named_or_counted(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "x"}]
    write_completions(tmp_path / "a", [(1.0, prompt, answer("ls", "1")), (2.0, [], answer("ls", "2"))])
    with pytest.raises(RecordingError, match=r"model-1.json: messages is empty"):
        list(open_stream(tmp_path, tokenizer=BPE))
    stream = open_stream(tmp_path, tokenizer=BPE, skip_bad=True)
    assert len(References.concatenate(stream)) == 1
    assert stream.skipped == 1
