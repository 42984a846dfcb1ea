"""`efficient-lmcache plan`: its contract with scripts, its three sources, and what users get wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from efficient_lmcache.cli import app
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.sizing.live import parse_live_pool

CONFIG = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
    "torch_dtype": "bfloat16",
}
BETA = 24 * 1024
METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="500"} 1.0
# TYPE efficient_lmcache:working_set_bytes gauge
efficient_lmcache:working_set_bytes{engine="0"} 100.0
efficient_lmcache:working_set_bytes{engine="1"} 1.47456e+08
# TYPE efficient_lmcache:active_pool_tasks gauge
efficient_lmcache:active_pool_tasks{engine="0"} 1.0
efficient_lmcache:active_pool_tasks{engine="1"} 4.0
# TYPE efficient_lmcache:mean_prompt_tokens gauge
efficient_lmcache:mean_prompt_tokens{engine="0"} 10.0
efficient_lmcache:mean_prompt_tokens{engine="1"} 2000.0
# TYPE efficient_lmcache:tier_capacity_bytes gauge
efficient_lmcache:tier_capacity_bytes{engine="0"} 1.073741824e+09
efficient_lmcache:tier_capacity_bytes{engine="1"} 5.36870912e+08
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("traces") / "small.trace"
    synthesize(file, Workload(tasks=6, calls_per_task=8, max_prompt_tokens=9_000))
    return file


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def given(config: Path, **changes: object) -> list[object]:
    """Arguments of a small plan without a trace; None leaves an option out, True makes it a flag."""
    options: dict[str, object] = {
        "without_trace": True,
        "mean_prompt_tokens": 2000,
        "active_pool": 2,
        "model": config,
        "tp": 8,
        "gpu": "H20",
        "gpu_kv_tokens": 2500,
        "chunk_tokens": 256,
        **changes,
    }
    arguments: list[object] = []
    for name, value in options.items():
        if value is not None:
            arguments.append("--" + name.replace("_", "-"))
            arguments += [] if value is True else value if isinstance(value, list) else [value]
    return arguments


def planned(*arguments: object) -> dict[str, Any]:
    status, out, err = run(*arguments, "--json")
    assert (status, err) == (0, "")
    document: dict[str, Any] = json.loads(out)
    return document


def test_the_contract_of_scripts_is_kept_without_a_trace(model):
    plan = planned(*given(model, host_gib=0.05))
    assert plan["working_set_bytes"] == 2000 * BETA
    assert plan["gamma_h"] == pytest.approx(2000 * BETA / (0.05 * 2**30))
    assert plan["gamma_g"] == pytest.approx(1.6)
    assert plan["obr"] == pytest.approx(0.848, abs=0.002)
    assert plan["recommended_gib_per_rank"] >= plan["working_set_bytes"] / 2**30
    assert plan["recommended_gib_per_node"] == pytest.approx(8 * plan["recommended_gib_per_rank"])
    (row,) = (row for row in plan["curve"] if row["host_gib"] == 0.05)
    assert row["computed_prefill_tokens_range"][0] <= row["computed_prefill_tokens"]
    assert row["restored_tokens"] <= row["restored_tokens_range"][1]
    assert any("assumed" in note for note in plan["notes"])
    assert plan["created_utc"].endswith("+00:00")


def test_a_trace_brings_its_own_mean_and_curve(model, trace):
    arguments = given(model, without_trace=None, mean_prompt_tokens=None, trace=trace, host_gib=0.01)
    plan = planned(*arguments)
    assert plan["workload"] == "small.trace"
    assert 3_000 < plan["mean_prompt_tokens"] < 9_000
    assert plan["curve"][0]["computed_prefill_tokens"] > plan["curve"][-1]["computed_prefill_tokens"]
    salted = planned(*arguments, "--salt-per-session")
    assert salted["curve"][-1]["computed_prefill_tokens"] > plan["curve"][-1]["computed_prefill_tokens"]


def test_text_names_recommendation_and_advice(model, tmp_path):
    figure = tmp_path / "curve.png"
    status, out, err = run(*given(model, host_gib=0.02, figure=figure))
    assert (status, err) == (0, "")
    assert "recommended" in out
    assert "working set per rank" in out
    assert "conditioned admission" in out
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_pauses_that_a_recording_does_not_tell_are_counted_and_said(model, tmp_path):
    """Two agents, of whose three later calls one has a delay."""
    rows = [("a", 1, None), ("b", 1, None), ("a", 2, 500), ("b", 2, None), ("a", 3, None)]
    file = tmp_path / "requests.jsonl"
    file.write_text(
        "".join(
            json.dumps(
                {"session_id": name, "input_length": 512 * n, "output_length": 5, "hash_ids": list(range(n))}
                | ({} if delay is None else {"delay": delay})
            )
            + "\n"
            for name, n, delay in rows
        )
    )
    asked = given(model, without_trace=None, mean_prompt_tokens=None, trace=file, chunk_tokens=512)
    assert (
        "pauses before 2 of the 3 calls that continue a lane are unknown, and taken for 0 s" in planned(*asked)["notes"]
    )


def test_several_tiers_are_all_on_the_curve(model):
    plan = planned(*given(model), "--host-gib", 0.02, "--host-gib", 0.3)
    assert {0.02, 0.3} <= {row["host_gib"] for row in plan["curve"]}


@contextmanager
def metrics_page(text: str) -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


LIVE = {"without_trace": None, "mean_prompt_tokens": None, "active_pool": None, "gpu_kv_tokens": None}


def test_a_live_engine_says_pool_prompts_tier_and_gpu_cache(model):
    with metrics_page(METRICS) as url:
        plan = planned(*given(model, **LIVE, from_metrics=url))
        other_tp = planned(*given(model, **LIVE, from_metrics=f"{url}/metrics", tp=1))
    assert (plan["active_pool"], plan["mean_prompt_tokens"]) == (4, 2000.0)
    assert plan["working_set_bytes"] == 147_456_000
    assert plan["gamma_h"] == pytest.approx(147_456_000 / 2**29)
    assert plan["gamma_g"] == pytest.approx(1.0)
    assert not any("does not follow" in note for note in plan["notes"])
    assert any("does not follow" in note for note in other_tp["notes"])


@pytest.mark.parametrize("capacity", ["0.0", "NaN", "+Inf", "-1.0"])
def test_a_tier_of_no_size_is_none(capacity):
    assert parse_live_pool(METRICS.replace("5.36870912e+08", capacity)).tier_gib is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no efficient_lmcache:working_set_bytes"),
        (METRICS.replace("active_pool_tasks", "other_tasks"), "active_pool_tasks is None; it must be a finite number"),
        (METRICS.replace("} 4.0", "} 0.0"), "active_pool_tasks is 0; ask while agents are running"),
        (METRICS.replace("} 2000.0", "} nan"), "mean_prompt_tokens is nan"),
        ("<html>", "is no page of metrics"),
    ],
)
def test_a_page_without_a_pool_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_live_pool(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without_trace": None}, "give one of --trace, --without-trace and --from-metrics"),
        ({"trace": "x"}, "give one of --trace, --without-trace and --from-metrics"),
        ({"without_trace": None, "trace": "absent"}, "--mean-prompt-tokens is for plans without a trace"),
        ({"without_trace": None, "mean_prompt_tokens": None, "trace": "absent"}, "absent: no such file or directory"),
        ({"mean_prompt_tokens": None}, "--mean-prompt-tokens is missing"),
        ({"mean_prompt_tokens": 5}, "--mean-prompt-tokens is 5; it must be from 100"),
        ({"active_pool": None}, "--active-pool is missing"),
        ({"active_pool": 0}, "--active-pool is 0; it must be at least 1"),
        ({"gpu_kv_tokens": None}, "--gpu-kv-tokens is missing"),
        ({"gpu_kv_tokens": 0}, "--gpu-kv-tokens is 0"),
        ({"host_gib": -1}, "--host-gib is -1; it must be a number > 0"),
        ({"ttl_s": 0}, "--ttl-s is 0"),
        ({"chunk_tokens": 0}, "--chunk-tokens is 0"),
        ({"chunk_tokens": 1023}, "--chunk-tokens is 1023; it must be a multiple of --gpu-block-tokens, 16"),
        ({"tp": 3}, "--tp 3: vLLM does not serve a model of 32 attention heads .* must divide 32"),
        ({"time_scale": "nan"}, "--time-scale is nan"),
        ({"time_scale": 1e300}, r"--time-scale is 1e\+300; it must be a number from 0 to 1,099,511,627,776"),
        ({"slots": 10**30}, "--slots is 10+; it must be at most 1,099,511,627,776"),
        (
            {"active_pool": 10**7},
            r"--active-pool 10000000 and --mean-prompt-tokens .* in blocks of .* make .* references",
        ),
        (
            {"prefill_tokens_per_s": [9, 3]},
            "--prefill-tokens-per-s is 9 3; it must be two numbers > 0, the smaller one",
        ),
        ({"gpu": "TPU"}, "--gpu 'TPU' has no profile; known are H100"),
        ({"kv_cache_dtype": "int3"}, "KV cache type 'int3' is not known"),
        ({"model": "absent.json"}, "absent.json: No such file or directory"),
        ({"figure": "curve.gif"}, "--figure curve.gif: must end in .png, .svg, .pdf"),
        ({"figure": "absent/curve.png"}, "there is no directory absent; make it first"),
        (
            {**LIVE, "from_metrics": "http://127.0.0.1:9"},
            r"--from-metrics http://127.0.0.1:9/metrics: cannot be read \(.*refused",
        ),
        ({**LIVE, "from_metrics": "nonsense"}, "--from-metrics 'nonsense': must be a URL like http://HOST:PORT"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_status_2(model, changes, message):
    status, out, err = run(*given(model, **changes))
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert re.search(message, err)


def test_a_model_whose_activated_parameters_are_unknown_has_no_ratio_until_they_are_given(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({name: value for name, value in CONFIG.items() if name != "vocab_size"}))
    assert planned(*given(config))["obr"] is None
    assert planned(*given(config, activated_params=3.3e9))["obr"] == pytest.approx(0.8456, abs=0.0005)


def test_one_tier_of_a_node_holds_the_latent_vectors_of_all_ranks(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64}))
    plan = planned(*given(config))
    assert plan["kv_bytes_per_token_per_rank"] == 48 * 576 * 2
    assert plan["recommended_gib_per_node"] == plan["recommended_gib_per_rank"] > 0
    assert any("MLA" in note for note in plan["notes"])


def test_layers_that_attend_to_a_window_are_stored_and_states_are_not_counted(tmp_path):
    config = tmp_path / "config.json"
    for other, layers in (("sliding_attention", 48), ("linear_attention", 12)):
        config.write_text(json.dumps({**CONFIG, "layer_types": ([other] * 3 + ["full_attention"]) * 12}))
        plan = planned(*given(config))
        assert plan["kv_bytes_per_token_per_rank"] == BETA * layers // 48
        assert any("12 of 48 layers keep KV" in note for note in plan["notes"]) == (layers < 48)


def test_a_model_without_kv_is_an_error(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, "layer_types": ["mamba"] * 48}))
    status, out, err = run(*given(config))
    assert (status, out) == (2, "")
    assert "nothing that a tier could hold" in err


def in_fresh_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_command_line_starts_without_numba_and_matplotlib():
    code = "import sys, efficient_lmcache.cli; print({'numba', 'matplotlib'} & set(sys.modules))"
    assert in_fresh_python(code).stdout == "set()\n"


@pytest.mark.parametrize(("package", "extra"), [("numba", []), ("matplotlib", ["--figure", "curve.png"])])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(model, package, extra):
    arguments = ["plan", *map(str, given(model)), *extra]
    code = f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = {arguments!r}\n"
    result = in_fresh_python(code + "from efficient_lmcache.cli import main; main()")
    assert result.returncode == 2
    assert "pip install 'efficient-lmcache[sizing]'" in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
