"""What the demonstration plans and what it says of its result; that it runs is for `make demo`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from efficient_lmcache.cli import app
from efficient_lmcache.replay import demo
from efficient_lmcache.replay.demo import DemoOptions, _new_directory, _plan, reading
from efficient_lmcache.replay.preflight import longest_call_tokens
from efficient_lmcache.replay.synthesize import synthesize
from efficient_lmcache.replay.trace import TraceReader


def test_tiers_and_gpu_cache_have_the_ratios_that_are_asked_for(tmp_path: Path) -> None:
    options, trace, model = DemoOptions(), tmp_path / "trace", tmp_path / "model"
    model.mkdir()
    # The shape that `model create` gives: 1 KiB of KV per token.
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    (model / "config.json").write_text(json.dumps({**shape, "dtype": "bfloat16"}))
    synthesize(trace, options.workload)
    runs = {run.out.name: run for run in _plan(options, model, trace, tmp_path)}
    assert next(iter(runs)) == "recompute"
    assert len(runs) == 7
    with TraceReader(trace) as reader:
        mean_prompt_tokens = reader.totals.prompt_tokens / reader.totals.calls
        longest_tokens = longest_call_tokens(reader, 16_384)
    working_set_bytes = (options.active_pool - 1) * mean_prompt_tokens * 1024
    for name, gamma in (("small-none", 2.3), ("large-fixed", 0.55)):
        assert working_set_bytes / (runs[name].host_gib * 2**30) == pytest.approx(gamma)
    gpu_kv_tokens = runs["recompute"].gpu_kv_tokens
    assert gpu_kv_tokens is not None
    assert options.active_pool * mean_prompt_tokens / gpu_kv_tokens == pytest.approx(1.5, rel=1e-3)
    assert longest_tokens + 256 < gpu_kv_tokens


def test_the_reading_states_the_ratios() -> None:
    ratios = {
        "recompute": None,
        "small-none": 1.0,
        "small-fixed": 0.71,
        "small-conditioned": 0.66,
        "large-none": 1.0,
        "large-fixed": 3.1,
        "large-conditioned": 1.0,
    }
    common = {"calls": 9, "gamma_h": 2.3, "computed_prefill_tokens": 100}
    rows = [{"run": name, **common, "computed_prefill_tokens_to_offload": ratio} for name, ratio in ratios.items()]
    text = reading(rows)
    for number in ("0.71", "0.66", "3.10", "1.00", "All 9 outputs"):
        assert number in text


def test_an_earlier_demonstration_is_kept(tmp_path: Path) -> None:
    first = _new_directory(tmp_path / "demo")
    (first / "run.json").touch()
    assert _new_directory(tmp_path / "demo") == tmp_path / "demo-2"


def test_an_output_directory_that_cannot_be_made_is_one_line_and_exit_code_2() -> None:
    pytest.importorskip("vllm", reason="needs vllm, from the extras cpu and gpu")
    result = CliRunner().invoke(app, ["demo", "--out", "/dev/null/x"])
    assert result.exit_code == 2
    assert result.stderr == "error: --out /dev/null/x: cannot be created: Not a directory\n"


def test_an_interrupted_demonstration_says_so_with_exit_code_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="needs vllm, from the extras cpu and gpu")

    def interrupted_run(*_: object) -> SimpleNamespace:  # stands for Ctrl-C during the first run
        return SimpleNamespace(status="interrupted")

    monkeypatch.setattr(demo, "run_replay", interrupted_run)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "d")])
    assert result.exit_code == 130
    assert result.stderr == "error: interrupted; finished and partial runs are kept\n"
