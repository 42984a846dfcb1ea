"""Makes vLLM emit recorded tokens: a logits processor for its V1 model runner.

Start vLLM with ``--logits-processors efficient_lmcache.replay.forced_output:ForcedOutputProcessor`` and
``EFFICIENT_LMCACHE_VOCAB_SIZE=<the model's vocabulary size>`` in its environment. A completion request opts in with
``vllm_xargs: {"efficient_lmcache.forced_tokens": [id, ...]}``, ``max_tokens`` equal to the list's length and
``ignore_eos: true``. It then emits exactly that list; requests that do not opt in are not touched.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from efficient_lmcache.replay.protocol import FORCED_TOKENS_KEY, VOCAB_SIZE_ENV

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig


class ForcedOutput(NamedTuple):
    """What one opted-in request must emit, and vLLM's own list of what it has emitted so far.

    vLLM appends to ``emitted_tokens`` (under async scheduling a placeholder, -1) when it samples, and hands over a
    new list with the output so far when a preempted request resumes: its length is always the next token's position.
    """

    recorded_tokens: list[int]
    emitted_tokens: Sequence[int]


class ForcedOutputProcessor(LogitsProcessor):
    """Leaves opted-in rows one possible token: the recorded one at the request's current position."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request that could not emit its recorded tokens (vLLM answers HTTP 400).

        Raises:
            ValueError: names the parameter and what is allowed.
        """
        extra_args = sampling_params.extra_args or {}
        if FORCED_TOKENS_KEY in extra_args:
            recorded_tokens = extra_args[FORCED_TOKENS_KEY]
            _check_tokens(recorded_tokens, declared_vocab_size())
            _check_sampling(sampling_params, len(recorded_tokens))

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        vocab_size = vllm_config.model_config.get_vocab_size()
        if declared_vocab_size() != vocab_size:
            raise ValueError(
                f"{VOCAB_SIZE_ENV} is {declared_vocab_size()} but the model's vocabulary has {vocab_size} entries: "
                "the API server would accept tokens that the model does not have, or refuse ones that it has"
            )
        self._device = device
        self._forced_outputs: dict[int, ForcedOutput] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._forced_outputs, batch_update, _forced_output)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Force all opted-in rows of ``logits`` ([rows, vocabulary]) in place.

        Positions are read here and not in ``update_state``: vLLM repairs its lists of emitted tokens in between.
        """
        rows: list[int] = []
        tokens: list[int] = []
        for row, (recorded_tokens, emitted_tokens) in self._forced_outputs.items():
            position = len(emitted_tokens)
            # Past the end, async scheduling samples a token that vLLM discards.
            if position < len(recorded_tokens):
                rows.append(row)
                tokens.append(recorded_tokens[position])
        if not rows:
            return logits
        row_index, token_index = async_tensor_h2d([rows, tokens], device=self._device, dtype=torch.int64)
        logits.index_fill_(0, row_index, -torch.inf)
        logits[row_index, token_index] = 0.0
        return logits


def declared_vocab_size() -> int:
    """The vocabulary size from the environment.

    Requests are validated in the API server, where vLLM gives a processor no configuration; the environment is what
    it shares with the worker, which checks the value against the model at start-up.
    """
    text = os.environ.get(VOCAB_SIZE_ENV)
    if text is None or not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError(
            f"{VOCAB_SIZE_ENV} is {text!r}; set it to the model's vocabulary size (a positive integer) in the server's "
            "environment, so that recorded tokens outside the vocabulary are refused"
        )
    return int(text)


def _forced_output(params: SamplingParams, _: list[int] | None, emitted_tokens: list[int]) -> ForcedOutput | None:
    recorded_tokens = (params.extra_args or {}).get(FORCED_TOKENS_KEY)
    return None if recorded_tokens is None else ForcedOutput(recorded_tokens, emitted_tokens)


def _check_tokens(tokens: object, vocab_size: int) -> None:
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(f"{FORCED_TOKENS_KEY} must be a non-empty list of token ids, not {tokens!r:.80}")
    for position, token in enumerate(tokens):
        if type(token) is not int:  # a bool is an int, but no token id
            raise ValueError(f"{FORCED_TOKENS_KEY}[{position}] is {token!r:.80}; every token id must be an integer")
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{FORCED_TOKENS_KEY}[{position}] is {token}; token ids of this model are 0 to {vocab_size - 1}"
            )


def _check_sampling(params: SamplingParams, length: int) -> None:
    """Refuse what could stop, lengthen, branch or override a recorded output of `length` tokens."""
    if params.max_tokens != length:
        raise ValueError(
            f"max_tokens is {params.max_tokens} (after the server's own limit); with {FORCED_TOKENS_KEY} it must be "
            f"the list's length, {length}, within the model's maximum length"
        )
    if not params.ignore_eos:
        raise ValueError(f"ignore_eos must be true with {FORCED_TOKENS_KEY}: a recorded end token must not stop early")
    if params.n != 1:
        raise ValueError(f"n is {params.n}; with {FORCED_TOKENS_KEY} it must be 1")
    for name in (
        "stop",
        "stop_token_ids",
        "min_tokens",
        "structured_outputs",
        "repetition_detection",
        "thinking_token_budget",
    ):
        if getattr(params, name):
            raise ValueError(f"{name} must not be set with {FORCED_TOKENS_KEY}: it could change the recorded output")
