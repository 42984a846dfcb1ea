"""Tokenizers that need no download: one that ships with vLLM, one trained on the spot, or a directory of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from efficient_lmcache.replay.extras import require
from efficient_lmcache.replay.trace import Tokens, TraceError

ALLOWED = "allowed are 'tekken', 'bpe:VOCAB' or a Hugging Face tokenizer's directory"
TURN_MARKERS = ("<|im_start|>", "<|im_end|>")
_TEKKEN_FILE = "tekken_240911.json"
_BYTES = 256
_LARGEST_BPE = 1 << 20  # its trainer takes memory for as many at once


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Text to token ids, without any template of its own.

    Attributes:
        name: as the manifest records it; never an absolute path.
        vocab_size: every id is below it.
        encode_batch: one uint32 array a text, in order; an empty text gives an empty array.
        decode: the text of some ids, special tokens included; what is cut inside a character shows as U+FFFD.
    """

    name: str
    vocab_size: int
    encode_batch: Callable[[list[str]], list[Tokens]]
    decode: Callable[[list[int]], str]


def load_tokenizer(spec: str, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """The tokenizer that `spec` names; `texts` is only called, for text to learn from, by ``bpe:VOCAB``.

    Raises TraceError for a spec that names none, saying what is allowed, and ValueError for a package that is missing,
    saying which extra brings it.
    """
    if spec == "tekken":
        return _load_tekken()
    if spec.startswith("bpe:"):
        return _train_bpe(spec, texts)
    directory = Path(spec)
    if (directory / "tokenizer.json").is_file():
        return _load_tokenizer_json(directory)
    if directory.is_dir():
        return _load_directory(directory)
    raise TraceError(f"tokenizer {spec!r}: no such tokenizer; {ALLOWED}")


@cache
def _load_tekken() -> Tokenizer:
    """Mistral's 131,072-id vocabulary, which ships inside a dependency of vLLM."""
    package = require("mistral_common", "tokenizer 'tekken'")
    tekken = require("mistral_common.tokens.tokenizers.tekken", "tokenizer 'tekken'")
    path = Path(str(package.__file__)).parent / "data" / _TEKKEN_FILE
    if not path.is_file():
        raise TraceError(f"tokenizer 'tekken': this version of mistral_common does not ship {_TEKKEN_FILE}")
    model = tekken.Tekkenizer.from_file(path)

    def encode_batch(texts: list[str]) -> list[Tokens]:
        return [np.asarray(model.encode(text, bos=False, eos=False), np.uint32) for text in texts]

    def decode(ids: list[int]) -> str:
        return str(model.decode(ids, special_token_policy=tekken.SpecialTokenPolicy.KEEP))

    return Tokenizer("tekken", model.n_words, encode_batch, decode)


def _train_bpe(spec: str, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """A byte-level BPE of at most VOCAB ids; the same texts in the same order give the same tokenizer."""
    smallest = _BYTES + len(TURN_MARKERS)
    size_text = spec.removeprefix("bpe:")
    if not size_text.isascii() or not size_text.isdigit() or not smallest <= int(size_text) <= _LARGEST_BPE:
        raise TraceError(f"tokenizer {spec!r}: VOCAB must be an integer from {smallest} to {_LARGEST_BPE}; {ALLOWED}")
    library = require("tokenizers", f"tokenizer {spec!r}")
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=int(size_text),
        special_tokens=list(TURN_MARKERS),
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts(), trainer)
    model.decoder = library.decoders.ByteLevel()
    return Tokenizer(spec, int(size_text), _encoder(model), _decoder(model))


def _load_tokenizer_json(directory: Path) -> Tokenizer:
    library = require("tokenizers", f"tokenizer {str(directory)!r}")
    try:
        model = library.Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exceptions for a file it cannot read
        raise TraceError(f"tokenizer {directory}: tokenizer.json cannot be read: {error}") from error
    vocab_size = max(model.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(directory.resolve().name, vocab_size, _encoder(model), _decoder(model))


def _load_directory(directory: Path) -> Tokenizer:
    """A directory without a tokenizer.json: transformers knows the older layouts, such as vocab.json + merges.txt."""
    library = require("transformers", f"tokenizer {str(directory)!r}")
    try:
        model = library.AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the tokenizer's own class raises
        reason = str(error).strip().partition("\n")[0]
        raise TraceError(f"tokenizer {directory}: not a Hugging Face tokenizer's directory: {reason}") from error

    def encode_batch(texts: list[str]) -> list[Tokens]:
        encoded = model(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        return [np.asarray(ids, np.uint32) for ids in encoded]

    def decode(ids: list[int]) -> str:
        return str(model.decode(ids))

    return Tokenizer(directory.resolve().name, max(model.get_vocab().values()) + 1, encode_batch, decode)


def _encoder(model: Any) -> Callable[[list[str]], list[Tokens]]:
    model.no_truncation()
    model.no_padding()

    def encode_batch(texts: list[str]) -> list[Tokens]:
        encodings = model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    return encode_batch


def _decoder(model: Any) -> Callable[[list[int]], str]:
    return lambda ids: str(model.decode(ids, skip_special_tokens=False))
