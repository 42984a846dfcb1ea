"""Import of mini-swe-agent trajectories, as its versions 1 and 2 write them, and of real recordings where there are."""

from __future__ import annotations

import gzip
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efficient_lmcache.replay.describe import describe
from efficient_lmcache.replay.importers import mini_swe_agent
from efficient_lmcache.replay.importers.importing import import_recording
from efficient_lmcache.replay.importers.tasks import DECODE_TOKENS_PER_S
from efficient_lmcache.replay.trace import Call, Tokens, TraceReader

pytest.importorskip("tokenizers", reason="needs the package tokenizers, which the extras cpu and gpu bring")

DATA = Path(os.environ.get("EFFICIENT_LMCACHE_DATA", Path(__file__).parents[2] / ".." / "shared"))
RECORDED = DATA / "traces" / "swebench-verified-mini-swe-agent.jsonl.gz"
BPE = "bpe:300"

Row = dict[str, Any]


def said(text: str, created: int, completion_tokens: int = 90) -> Row:
    usage = {"completion_tokens": completion_tokens}
    return {"role": "assistant", "content": text, "extra": {"response": {"created": created, "usage": usage}}}


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def task(name: str = "task-a", start: int = 100) -> Row:
    """Two calls; the second is dispatched 7 s after the first, which took about 2 s."""
    return {
        "instance_id": name,
        "trajectory_format": "mini-swe-agent-1",
        "messages": [
            {"role": "system", "content": "You fix bugs."},
            user(f"Please fix {name}: zażółć 🐍"),
            said("THOUGHT: look\n```bash\nls\n```", start, completion_tokens=180),
            user("<output>a.py</output>"),
            said("done", start + 7),
            user("submitted"),
        ],
    }


def version_2_task() -> Row:
    def at(row: Row, timestamp: float) -> Row:
        return {**row, "extra": {"timestamp": timestamp}}

    tool_call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    parts = [{"type": "text", "text": "<output>"}, {"type": "text", "text": "b.py</output>"}]
    return {
        "trajectory_format": "mini-swe-agent-1.1",
        "messages": [
            {"role": "system", "content": "You fix bugs."},
            user("Please fix it."),
            at({"role": "assistant", "content": None, "tool_calls": [tool_call]}, 10.0),
            at({"role": "tool", "tool_call_id": "1", "content": parts}, 12.5),
            at({"role": "assistant", "content": "done", "tool_calls": None}, 14.0),
            {"role": "exit", "content": "the patch", "extra": {"exit_status": "Submitted"}},
        ],
    }


def write_lines(path: Path, tasks: list[Any]) -> Path:
    text = "".join(json.dumps(each) + "\n" for each in tasks)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def calls_of(path: Path) -> dict[str, list[Call]]:
    with TraceReader(path) as reader:
        reader.verify()
        return {each.task_id: list(reader.calls(number)) for number, each in enumerate(reader.tasks)}


def bytes_of(tokens: Tokens) -> list[int]:
    return [int(token) for token in tokens]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "runs.jsonl.gz", [task("task-a"), task("task-b", 150), task("task-c", 130)])


def test_every_assistant_message_is_a_call_whose_prompt_is_all_before_it(source: Path, tmp_path: Path) -> None:
    import_recording(source, tmp_path / "t", tokenizer=BPE)
    calls = calls_of(tmp_path / "t")
    assert list(calls) == ["task-a", "task-b", "task-c"]
    for first, second in calls.values():
        known = bytes_of(first.prompt_tokens) + bytes_of(first.output_tokens)
        assert bytes_of(second.prompt_tokens)[: len(known)] == known
        assert len(second.prompt_tokens) > len(known)


def test_intervals_follow_the_stated_rule_for_recorded_responses(source: Path, tmp_path: Path) -> None:
    import_recording(source, tmp_path / "t", tokenizer=BPE)
    for name, start_s in (("task-a", 0.0), ("task-b", 50.0), ("task-c", 30.0)):
        first, second = calls_of(tmp_path / "t")[name]
        assert (first.interval_s, second.interval_s) == (0.0, 7 - 180 / DECODE_TOKENS_PER_S)
        assert (first.start_s, second.start_s) == (start_s, start_s + 7)
    with TraceReader(tmp_path / "t") as reader:
        assert any("completion_tokens / 90 s" in each for each in reader.manifest.assumptions)


def test_version_2_files_with_tool_calls_and_timestamps_are_read(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.traj.json").write_text(json.dumps(version_2_task()))
    import_recording(tmp_path / "runs", tmp_path / "t", tokenizer=BPE)
    calls = calls_of(tmp_path / "t")
    assert list(calls) == ["one", "two"]
    first, second = calls["one"]
    assert second.interval_s == 2.5
    assert second.start_s is None
    known = bytes_of(first.prompt_tokens) + bytes_of(first.output_tokens)
    assert bytes_of(second.prompt_tokens)[: len(known)] == known


def test_answers_of_the_responses_api_are_read_as_chat_messages(tmp_path: Path) -> None:
    def answered(text: str, command: str, timestamp: float) -> Row:
        said = {"type": "message", "content": [{"type": "output_text", "text": text, "annotations": []}]}
        call = {"type": "function_call", "call_id": "1", "name": "bash", "arguments": json.dumps({"command": command})}
        output = [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, said, call]
        usage = {"input_tokens": 9, "output_tokens": 90}
        extra = {"actions": [], "timestamp": timestamp}
        return {"object": "response", "created_at": 5, "output": output, "usage": usage, "extra": extra}

    observed = {"type": "function_call_output", "call_id": "1", "output": "a.py", "extra": {"timestamp": 12.5}}
    refused = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Call a tool."}]}
    messages = [*task()["messages"][:2], answered("Look.", "ls", 10.0), observed, refused, answered("End.", "x", 20.0)]
    (tmp_path / "one.traj.json").write_text(json.dumps({"messages": messages}))
    (read,) = mini_swe_agent.tasks(tmp_path / "one.traj.json")
    first, second = read.calls
    tool_call = '\n<tool_call>\n{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}\n</tool_call>'
    assert first.response == f"Look.{tool_call}"
    assert second.messages[2:] == [("assistant", first.response), ("tool", "a.py"), ("user", "Call a tool.")]
    assert first.start_s == 5


def test_hidden_reasoning_among_a_messages_parts_is_left_out(tmp_path: Path) -> None:
    parts = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Look. "},
        {"type": "refusal", "refusal": "I cannot."},
    ]
    messages = [user("Fix it."), {"role": "assistant", "content": parts}, user("Go on."), said("done", 9)]
    named = {"instance_id": None, "trajectory_format": None, "messages": messages}
    (read,) = mini_swe_agent.tasks(write_lines(tmp_path / "one.jsonl", [named]))
    assert read.task_id == "line 1"
    assert [call.response for call in read.calls] == ["Look. I cannot.", "done"]


@pytest.mark.parametrize("name", ["bug-1.traj.json", "bug-1.json", "bug-1.traj.json.gz", "bug-1.json.gz"])
def test_a_file_of_one_trajectory_may_be_indented_and_compressed(name: str, tmp_path: Path) -> None:
    written = json.dumps({**version_2_task(), "info": {"a": 1}}, indent=2).encode()
    (tmp_path / name).write_bytes(gzip.compress(written) if name.endswith(".gz") else written)
    import_recording(tmp_path / name, tmp_path / "t", tokenizer=BPE)
    assert list(calls_of(tmp_path / "t")) == ["bug-1"]


def test_intervals_that_nothing_tells_are_0_and_counted(tmp_path: Path) -> None:
    untimed = task("task-b")
    for message in untimed["messages"]:
        message.pop("extra", None)
    import_recording(write_lines(tmp_path / "runs.jsonl", [task(), untimed]), tmp_path / "t", tokenizer=BPE)
    assert [call.interval_s for call in calls_of(tmp_path / "t")["task-b"]] == [0.0, 0.0]
    with TraceReader(tmp_path / "t") as reader:
        assert reader.manifest.history[0]["unknown_intervals"] == 1
        assert any("any other that the recording does not tell, is 0" in each for each in reader.manifest.assumptions)


def test_plain_lines_and_compressed_lines_give_the_same_tasks(source: Path, tmp_path: Path) -> None:
    plain = tmp_path / "runs.jsonl"
    plain.write_bytes(gzip.decompress(source.read_bytes()))
    import_recording(source, tmp_path / "t", tokenizer=BPE)
    import_recording(plain, tmp_path / "u", tokenizer=BPE)
    with TraceReader(tmp_path / "t") as left, TraceReader(tmp_path / "u") as right:
        assert left.tasks == right.tasks


def test_a_sample_is_seeded_and_in_recorded_order(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "runs.jsonl", [task(f"task-{number:02d}") for number in range(30)])
    samples = []
    for seed in (0, 0, 1):
        import_recording(source, tmp_path / "t", tokenizer=BPE, tasks=5, seed=seed)
        samples.append(list(calls_of(tmp_path / "t")))
    assert samples[0] == samples[1] == sorted(samples[0])
    assert samples[0] != samples[2]


def test_more_tasks_than_there_are_is_an_error_with_their_number(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot take 4 tasks; it has 3 with calls"):
        import_recording(source, tmp_path / "t", tokenizer=BPE, tasks=4)


def test_trajectories_without_calls_are_skipped_and_counted(tmp_path: Path) -> None:
    silent = {**task("silent"), "messages": [user("hello")]}
    source = write_lines(tmp_path / "runs.jsonl", [silent, task("task-a"), silent])
    import_recording(source, tmp_path / "t", tokenizer=BPE)
    with TraceReader(tmp_path / "t") as reader:
        assert [each.task_id for each in reader.tasks] == ["task-a"]
        assert reader.manifest.history[0]["skipped_without_calls"] == 2
    only_silent = write_lines(tmp_path / "silent.jsonl", [silent])
    with pytest.raises(ValueError, match="has no call to import"):
        import_recording(only_silent, tmp_path / "u", tokenizer=BPE)


def test_folding_keeps_the_prefix_structure_and_is_recorded(source: Path, tmp_path: Path) -> None:
    import_recording(source, tmp_path / "t", tokenizer=BPE)
    import_recording(source, tmp_path / "folded", tokenizer=BPE, vocab_size=100)
    with TraceReader(tmp_path / "t") as whole, TraceReader(tmp_path / "folded") as folded:
        assert folded.manifest.vocab_size == 100
        assert "token ids are folded: id modulo 100" in folded.manifest.assumptions
        assert describe(folded)["shared_prefix"] == describe(whole)["shared_prefix"]
        for left, right in zip(whole.calls(0), folded.calls(0), strict=True):
            assert np.array_equal(left.prompt_tokens % 100, right.prompt_tokens)


def test_a_larger_vocabulary_than_the_tokenizers_folds_nothing(source: Path, tmp_path: Path) -> None:
    import_recording(source, tmp_path / "t", tokenizer=BPE, vocab_size=5_000)
    with TraceReader(tmp_path / "t") as reader:
        assert reader.manifest.vocab_size == 300
        assert not any("folded" in each for each in reader.manifest.assumptions)


def test_a_repeated_import_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for name in ("t", "u"):
        import_recording(source, tmp_path / name, tokenizer=BPE)
    assert (tmp_path / "t").read_bytes() == (tmp_path / "u").read_bytes()


def test_the_manifest_holds_no_absolute_path(source: Path, tmp_path: Path) -> None:
    import_recording(source, tmp_path / "t", tokenizer=BPE)
    with TraceReader(tmp_path / "t") as reader:
        assert reader.manifest.source == "mini-swe-agent: runs.jsonl.gz"
        assert str(tmp_path) not in json.dumps(reader.manifest.to_json())


def changed(index: int, **fields: Any) -> Row:
    """A task with some fields of one message changed."""
    row = task("task-b")
    row["messages"][index] = {**row["messages"][index], **fields}
    return row


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], r"line 2 must be a JSON object, not \[\]"),
        ({**task(), "instance_id": []}, r"line 2: instance_id must be a non-empty text, not \[\]"),
        ({**task(), "messages": None}, "line 2: messages must be a list of objects, not None"),
        ({**task(), "trajectory_format": "mini-swe-agent-9"}, "trajectory_format is 'mini-swe-agent-9'; this build"),
        (changed(1, role="robot"), r"line 2: messages\[1\].role is 'robot'; allowed are system"),
        (changed(1, content=None), r"line 2: messages\[1\].content must be text or a list of text parts, not NoneType"),
        (changed(1, content=[{"type": "image_url"}]), r"messages\[1\].content\[0\] is of type 'image_url'"),
        (changed(1, object="response"), r"messages\[1\]: output must be a list of objects, not None"),
        (
            changed(2, object="response", output=[{"type": "message"}]),
            r"output\[0\]: content must be a list of objects",
        ),
        (changed(2, extra=[]), r"messages\[2\].extra must be dict, not list"),
        (
            changed(2, extra={"response": {"created": "now"}}),
            r"messages\[2\].extra.response.created must be int or float",
        ),
        (changed(2, tool_calls=[{"id": 1}]), r"messages\[2\].tool_calls\[0\].function must be an object with a name"),
        (changed(2, extra={"timestamp": 10**400}), r"messages\[2\].timestamp is 1000.*; it must be a number from 0 to"),
        (
            changed(2, extra={"timestamp": 1_767_225_600_000}),
            r"messages\[2\].timestamp is 1767225600000; it must be in seconds",
        ),
        (
            changed(2, extra={"response": {"created": 1_767_225_600_000}}),
            r"messages\[2\].extra.response.created is 1767225600000; it must be in seconds",
        ),
        ({**task(), "instance_id": "\ud800"}, "line 2: instance_id is not Unicode"),
    ],
)
def test_malformed_records_name_file_line_and_field(tmp_path: Path, bad: Any, message: str) -> None:
    source = write_lines(tmp_path / "runs.jsonl", [task(), bad])
    with pytest.raises(ValueError, match=rf"runs\.jsonl: .*{message}"):
        import_recording(source, tmp_path / "t", tokenizer=BPE)
    assert not (tmp_path / "t").exists()


def test_a_call_without_a_prompt_is_malformed(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "runs.jsonl", [{**task(), "messages": [said("hello", 1)]}])
    with pytest.raises(ValueError, match=r"messages\[0\] is the assistant's; a call needs a prompt before it"):
        import_recording(source, tmp_path / "t", tokenizer=BPE)


def test_unreadable_sources_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps(task()).encode() * 50)[:-20])
    (tmp_path / "text.jsonl").write_text("hello\n")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "notes.txt").write_text("hello\n")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("cut.jsonl.gz", "cut.jsonl.gz: cannot be read after line 0"),
        ("text.jsonl", "text.jsonl: line 1: not JSON"),
        ("deep.jsonl", "deep.jsonl: line 1: not a record: nested too deep"),
        ("notes.txt", "unknown kind of file; allowed are"),
        ("empty", r"holds no \*\.traj\.json"),
        ("absent.jsonl", "no such file or directory"),
    ):
        with pytest.raises(ValueError, match=message):
            import_recording(tmp_path / name, tmp_path / "t", format_="mini-swe-agent", tokenizer=BPE)


@pytest.mark.skipif(
    not RECORDED.is_file(), reason="no recorded trajectories; EFFICIENT_LMCACHE_DATA names their folder"
)
def test_recorded_trajectories_are_append_only_and_mostly_cache_stable(tmp_path: Path) -> None:
    with gzip.open(RECORDED, "rt") as lines:
        (tmp_path / "recorded.jsonl").write_text("".join(islice(lines, 4)))
    import_recording(tmp_path / "recorded.jsonl", tmp_path / "t", tokenizer="bpe:2000", tasks=3)
    with TraceReader(tmp_path / "t") as reader:
        assert len(reader.tasks) == 3
        facts = describe(reader)
        for number in range(3):
            known: list[int] = []
            for call in reader.calls(number):
                assert bytes_of(call.prompt_tokens)[: len(known)] == known
                known = bytes_of(call.prompt_tokens) + bytes_of(call.output_tokens)
    assert 0.95 < facts["shared_prefix"]["cache_stable_share"] < 1
