"""The small random model: 1 KiB of KV a token, the same every time, and never over somebody else's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from efficient_lmcache.cli import app
from efficient_lmcache.replay.model import MARKER, create_model

torch = pytest.importorskip("torch", reason="needs torch, which the extras cpu and gpu bring")
transformers = pytest.importorskip("transformers", reason="needs transformers, which the extras cpu and gpu bring")


def test_it_costs_one_kibibyte_of_kv_a_token(tmp_path: Path) -> None:
    config = json.loads((create_model(tmp_path / "m", vocab_size=512) / "config.json").read_text())
    elements = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert config["dtype"] == "bfloat16"
    assert elements * 2 == 1_024
    assert (config["vocab_size"], config["max_position_embeddings"]) == (512, 65_536)
    assert config["eos_token_id"] is None


def test_the_same_arguments_give_the_same_weights(tmp_path: Path) -> None:
    one, two = (create_model(tmp_path / name, vocab_size=512) / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_what_it_predicts_depends_on_early_tokens_of_the_prompt(tmp_path: Path) -> None:
    model = transformers.Qwen3ForCausalLM.from_pretrained(create_model(tmp_path / "m", vocab_size=512))
    prompt = torch.randint(512, (1, 256), generator=torch.Generator().manual_seed(0))
    changed = prompt.clone()
    changed[:, 32:64] = torch.randint(512, (1, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        left, right = (model(each, logits_to_keep=64).logits.argmax(-1) for each in (prompt, changed))
    assert (left != right).float().mean() > 0.5


def test_its_own_directory_is_replaced_but_no_other(tmp_path: Path) -> None:
    create_model(tmp_path / "m", vocab_size=512)
    create_model(tmp_path / "m", vocab_size=256)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["vocab_size"] == 256
    assert json.loads((tmp_path / "m" / MARKER).read_text())["vocab_size"] == 256
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("keep me")
    with pytest.raises(ValueError, match="not empty and not a model made by `model create`"):
        create_model(tmp_path / "other")
    assert [each.name for each in (tmp_path / "other").iterdir()] == ["precious"]


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--vocab is 0; it must be from 1 to"):
        create_model(tmp_path / "m", vocab_size=0)
    with pytest.raises(ValueError, match="--max-model-len is 10000000000; it must be from 1 to"):
        create_model(tmp_path / "m", max_model_len=10**10)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="not a directory"):
        create_model(tmp_path / "file")


def test_the_command_line_sets_vocabulary_and_context(tmp_path: Path) -> None:
    arguments = ["model", "create", str(tmp_path / "m"), "--vocab", "512", "--max-model-len", "4096"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["vocab_size"], config["max_position_embeddings"]) == (512, 4096)


@pytest.mark.parametrize("arguments", [["/dev/null/m", "--vocab", "512"], ["m", "--vocab", "9" * 20]])
def test_a_model_that_cannot_be_made_is_one_line_and_exit_code_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["model", "create", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
