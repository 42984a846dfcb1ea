"""Tokenizers by name: shipped, trained on the spot, or a directory; and one clear error for everything else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from efficient_lmcache.replay.tokenizers import TURN_MARKERS, load_tokenizer
from efficient_lmcache.replay.trace import TraceError

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers, from the extras cpu and gpu")

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "class A:\n    def f(self): ...\n" * 20, "zażółć gęślą jaźń 🐍"]


def texts() -> Iterable[str]:
    return iter(TEXTS)


def no_texts() -> Iterable[str]:
    raise AssertionError("only a tokenizer that learns asks for text")


def test_a_trained_tokenizer_covers_any_text_within_its_vocabulary() -> None:
    tokenizer = load_tokenizer("bpe:400", texts)
    seen, unseen = tokenizer.encode_batch([TEXTS[0], "∀x ∈ ℝ \x00 never seen"])
    assert (tokenizer.name, tokenizer.vocab_size) == ("bpe:400", 400)
    assert len(seen) < len(TEXTS[0].encode()) / 2
    assert len(unseen) > 0
    assert max(seen.max(), unseen.max()) < 400


def test_turn_markers_are_single_tokens_of_a_trained_tokenizer() -> None:
    tokenizer = load_tokenizer("bpe:300", texts)
    assert [len(ids) for ids in tokenizer.encode_batch([*TURN_MARKERS, ""])] == [1, 1, 0]


def test_training_is_the_same_in_another_process() -> None:
    program = (
        "from efficient_lmcache.replay.tokenizers import load_tokenizer\n"
        f"texts = {TEXTS!r}\n"
        "print([ids.tolist() for ids in load_tokenizer('bpe:500', lambda: texts).encode_batch(texts)])"
    )
    command = [sys.executable, "-c", program]
    other = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert other == f"{[ids.tolist() for ids in load_tokenizer('bpe:500', texts).encode_batch(TEXTS)]}\n"


def test_a_directory_with_a_tokenizer_is_used_under_its_name(tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 5, "?": 1}, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.enable_truncation(max_length=2)
    model.save(str(directory / "tokenizer.json"))
    tokenizer = load_tokenizer(str(directory), no_texts)
    assert (tokenizer.name, tokenizer.vocab_size) == ("my-model", 6)
    assert tokenizer.encode_batch(["a b a b"])[0].tolist() == [0, 5, 0, 5]


def test_a_directory_without_a_tokenizer_json_is_read_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the package transformers, from the extras cpu and gpu")
    directory = tmp_path / "older"
    directory.mkdir()
    letters = {letter: number for number, letter in enumerate("abcĠ")}
    (directory / "vocab.json").write_text(json.dumps({**letters, "ab": 4, "<|endoftext|>": 7}))
    (directory / "merges.txt").write_text("#version: 0.2\na b\n")
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = load_tokenizer(str(directory), no_texts)
    assert (tokenizer.name, tokenizer.vocab_size) == ("older", 8)
    assert [ids.tolist() for ids in tokenizer.encode_batch(["abc ab", ""])] == [[4, 2, 3, 4], []]


def test_a_directory_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the package transformers, from the extras cpu and gpu")
    with pytest.raises(TraceError, match=f"tokenizer {tmp_path}: not a Hugging Face tokenizer's directory: ") as error:
        load_tokenizer(str(tmp_path), no_texts)
    assert "\n" not in str(error.value)


def test_tekken_ships_with_vllms_dependencies() -> None:
    pytest.importorskip("mistral_common", reason="needs mistral_common, which vLLM depends on")
    tokenizer = load_tokenizer("tekken", no_texts)
    (ids,) = tokenizer.encode_batch(["def f(x): return x"])
    assert tokenizer.vocab_size == 131_072
    assert 0 < len(ids) < 12


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt2", "tokenizer 'gpt2': no such tokenizer; allowed are 'tekken', 'bpe:VOCAB' or a Hugging Face"),
        ("bpe:12", "tokenizer 'bpe:12': VOCAB must be an integer from 258 to 1048576"),
        ("bpe:" + "9" * 24, "VOCAB must be an integer from 258 to 1048576"),
        ("bpe:many", "tokenizer 'bpe:many': VOCAB must be an integer"),
    ],
)
def test_an_unknown_tokenizer_says_what_is_allowed(spec: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_tokenizer(spec, no_texts)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TraceError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(str(tmp_path), no_texts)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # stands for an environment without the extra
    with pytest.raises(
        ValueError, match=r"tokenizer 'bpe:300' needs the package tokenizers: install efficient-lmcache\[cpu\]"
    ):
        load_tokenizer("bpe:300", no_texts)
