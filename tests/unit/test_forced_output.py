"""The forced-output processor against vLLM's own batch, logits and start-up code."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessors, build_logitsprocs  # noqa: E402
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch  # noqa: E402

from efficient_lmcache.replay.forced_output import ForcedOutputProcessor  # noqa: E402
from efficient_lmcache.replay.protocol import FORCED_OUTPUT_PROCESSOR, FORCED_TOKENS_KEY, VOCAB_SIZE_ENV  # noqa: E402

VOCAB_SIZE = 50
ROWS = 8
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _declared_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VOCAB_SIZE_ENV, str(VOCAB_SIZE))


def config(vocab_size: int = VOCAB_SIZE, speculative: object = None) -> Any:
    """The two values of a vLLM configuration that are read here."""
    model = SimpleNamespace(get_vocab_size=lambda: vocab_size)
    scheduler = SimpleNamespace(max_num_seqs=ROWS)
    return SimpleNamespace(model_config=model, speculative_config=speculative, scheduler_config=scheduler)


def processor() -> ForcedOutputProcessor:
    return ForcedOutputProcessor(config(), CPU, False)


def params(tokens: Any = None, **changed: Any) -> SamplingParams:
    length = len(tokens) if isinstance(tokens, list) and tokens else 4
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": length, "ignore_eos": True, **changed}
    return SamplingParams(extra_args=None if tokens is None else {FORCED_TOKENS_KEY: tokens}, **fields)


class Engine:
    """vLLM's persistent batch with the processor in it, stepped as its model runner steps it.

    With `asynchronous` the runner knows of a sampled token only that there is one (-1) until the next step samples,
    and a request that is preempted may lose its latest token.
    """

    def __init__(self, rng: random.Random, asynchronous: bool) -> None:
        self.rng = rng
        self.asynchronous = asynchronous
        self.batch = InputBatch(
            max_num_reqs=ROWS,
            max_model_len=64,
            max_num_batched_tokens=64,
            device=CPU,
            vocab_size=VOCAB_SIZE,
            block_sizes=[16],
            max_num_blocks_per_req=[4],
            logitsprocs=LogitsProcessors([processor()]),
            logitsprocs_need_output_token_ids=True,
        )
        self.states: dict[str, CachedRequestState] = {}
        self.emitted: dict[str, list[int]] = {}
        self.recorded: dict[str, list[int]] = {}
        self.preempted: list[str] = []
        self.count = 0

    def new_request(self) -> None:
        forced = self.rng.random() < 0.7
        tokens = [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.randrange(1, 9))]
        request_id = f"r{self.count}"
        self.count += 1
        self.states[request_id] = CachedRequestState(
            req_id=request_id,
            prompt_token_ids=[1, 2, 3],
            mm_features=[],
            sampling_params=params(tokens if forced else None, max_tokens=len(tokens)),
            generator=None,
            block_ids=([0],),
            num_computed_tokens=0,
            output_token_ids=[],
        )
        self.emitted[request_id] = []
        self.recorded[request_id] = tokens if forced else []
        self.batch.add_request(self.states[request_id])

    def preempt(self, request_id: str) -> None:
        self.batch.remove_request(request_id)
        self.preempted.append(request_id)
        if self.asynchronous:
            if self.emitted[request_id] and self.rng.random() < 0.5:
                self.emitted[request_id].pop()
            self.states[request_id].output_token_ids = list(self.emitted[request_id])

    def resume(self) -> None:
        request_id = self.preempted.pop(self.rng.randrange(len(self.preempted)))
        self.batch.add_request(self.states[request_id])

    def step(self) -> None:
        running = list(self.batch.req_id_to_index)
        for request_id in running:
            if len(self.emitted[request_id]) >= self.states[request_id].sampling_params.max_tokens:
                self.batch.remove_request(request_id)  # finished
            elif self.rng.random() < 0.1:
                self.batch.remove_request(request_id)  # aborted
            elif self.rng.random() < 0.2:
                self.preempt(request_id)
        while self.batch.num_reqs < ROWS and self.rng.random() < 0.6:
            if self.preempted and self.rng.random() < 0.5:
                self.resume()
            else:
                self.new_request()
        self.batch.condense()
        if self.batch.num_reqs >= 2 and self.rng.random() < 0.5:
            self.batch.swap_states(*self.rng.sample(range(self.batch.num_reqs), 2))
        self.batch.refresh_metadata()
        if self.batch.num_reqs:
            self.sample()

    def sample(self) -> None:
        request_ids = self.batch.req_ids
        for request_id in request_ids:
            tokens = self.states[request_id].output_token_ids
            tokens[:] = self.emitted[request_id]  # the repair of placeholders just before logits processors
        before = torch.rand(
            len(request_ids), VOCAB_SIZE, generator=torch.Generator().manual_seed(self.rng.getrandbits(32))
        )
        after = before.clone()
        for logits_processor in self.batch.logitsprocs.non_argmax_invariant:
            after = logits_processor.apply(after)
        for row, request_id in enumerate(request_ids):
            self.check_row(request_id, before[row], after[row])
            if self.rng.random() < 0.3:
                continue  # a partly prefilled prompt: its row is sampled and thrown away
            token = int(after[row].argmax())
            self.emitted[request_id].append(token)
            self.states[request_id].output_token_ids.append(-1 if self.asynchronous else token)

    def check_row(self, request_id: str, before: Any, after: Any) -> None:
        recorded, position = self.recorded[request_id], len(self.emitted[request_id])
        if position < len(recorded):
            assert after.isfinite().nonzero().flatten().tolist() == [recorded[position]]
        else:
            assert torch.equal(before, after)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), asynchronous=st.booleans())
def test_forced_rows_follow_their_recording_and_others_stay_bit_equal_however_the_batch_changes(
    seed: int, asynchronous: bool
) -> None:
    engine = Engine(random.Random(seed), asynchronous)
    for _ in range(40):
        engine.step()
    for request_id, recorded in engine.recorded.items():
        if recorded:
            assert engine.emitted[request_id] == recorded[: len(engine.emitted[request_id])]


def test_a_batch_without_forced_requests_gets_its_own_logits_back() -> None:
    logits = torch.rand(3, VOCAB_SIZE)
    assert processor().apply(logits) is logits


def test_forcing_survives_random_sampling() -> None:
    engine = Engine(random.Random(0), asynchronous=False)
    engine.new_request()
    while not engine.recorded["r0"]:
        engine = Engine(random.Random(engine.rng.random()), asynchronous=False)
        engine.new_request()
    engine.batch.refresh_metadata()
    logits = torch.rand(1, VOCAB_SIZE)
    for logits_processor in engine.batch.logitsprocs.non_argmax_invariant:
        logits = logits_processor.apply(logits)
    probabilities = logits.softmax(-1)[0]
    assert probabilities[engine.recorded["r0"][0]] == 1.0


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "non-empty list"),
        ("12", "non-empty list"),
        (7, "non-empty list"),
        ([1, 2.0], r"\[1\] is 2.0; every token id must be an integer"),
        ([True], r"\[0\] is True; every token id must be an integer"),
        (["1"], "must be an integer"),
        ([1, VOCAB_SIZE], r"\[1\] is 50; token ids of this model are 0 to 49"),
        ([-1], "token ids of this model are 0 to 49"),
    ],
)
def test_tokens_that_cannot_be_forced_are_refused(tokens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        ForcedOutputProcessor.validate_params(params(tokens))
    assert FORCED_TOKENS_KEY in str(error.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_tokens": 3}, "max_tokens is 3 .* it must be the list's length, 2"),
        ({"ignore_eos": False}, "ignore_eos must be true"),
        ({"n": 2, "temperature": 1.0}, "n is 2; .* must be 1"),
        ({"stop": ["end"], "detokenize": True}, "stop must not be set"),
        ({"stop_token_ids": [3]}, "stop_token_ids must not be set"),
        ({"min_tokens": 1}, "min_tokens must not be set"),
    ],
)
def test_sampling_that_could_change_the_recorded_output_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ForcedOutputProcessor.validate_params(params([1, 2], **changed))


def test_structured_outputs_are_refused() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    with pytest.raises(ValueError, match="structured_outputs must not be set"):
        ForcedOutputProcessor.validate_params(params([1], structured_outputs=StructuredOutputsParams(regex="a")))


def test_a_request_that_does_not_opt_in_is_not_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VOCAB_SIZE_ENV)
    ForcedOutputProcessor.validate_params(params(None, stop_token_ids=[3], n=2, temperature=1.0))


@pytest.mark.parametrize("value", [None, "", "0", "-5", "many", "1.5"])
def test_start_up_without_a_vocabulary_size_says_what_to_set(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VOCAB_SIZE_ENV)
    if value is not None:
        monkeypatch.setenv(VOCAB_SIZE_ENV, value)
    with pytest.raises(ValueError, match=f"{VOCAB_SIZE_ENV} is .* set it to the model's vocabulary size"):
        processor()


def test_start_up_with_another_vocabulary_size_than_the_models_fails() -> None:
    with pytest.raises(ValueError, match="is 50 but the model's vocabulary has 51 entries"):
        ForcedOutputProcessor(config(vocab_size=51), CPU, False)


def test_start_up_with_speculative_decoding_fails() -> None:
    with pytest.raises(ValueError, match="speculative decoding"):
        build_logitsprocs(config(speculative=object()), CPU, False, False, (FORCED_OUTPUT_PROCESSOR,))


def test_vllm_loads_the_processor_by_its_name() -> None:
    loaded = build_logitsprocs(config(), CPU, False, False, (FORCED_OUTPUT_PROCESSOR,))
    assert any(isinstance(p, ForcedOutputProcessor) for p in loaded.non_argmax_invariant)
