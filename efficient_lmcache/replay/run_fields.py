"""What is read of a run's files, field by field."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from efficient_lmcache.replay.options import DEFAULT_BLOCK_TOKENS
from efficient_lmcache.replay.shapes import Count, Number, Shape

Positive = Annotated[Count, Field(ge=1)]


class EstimateFields(Shape):
    """`WorkingSetEstimate`."""

    active_pool: Count
    mean_prompt_tokens: Number
    bytes_per_token: Positive
    bytes: Number


class DecisionFields(Shape):
    """Of a row of decisions.jsonl; see `core.admission.Decision.record`."""

    now_s: Number
    save: bool
    outcome: str
    pressure: bool
    task: str | int
    prompt_tokens: Count
    host_match_tokens: Count
    new_full_chunks: Count
    write_threshold_chunks: Count
    estimate: EstimateFields
    capacity_bytes: Annotated[Number, Field(le=1 << 62)] | None
    full_and_evicting: bool | None
    occupancy: Annotated[Number, Field(le=1 << 20)] | None
    evicted_chunks: Count | None
    report_age_s: Number | None

    @model_validator(mode="after")
    def _reported_whole(self) -> DecisionFields:
        if self.report_age_s is not None and None in (self.capacity_bytes, self.occupancy, self.evicted_chunks):
            raise ValueError("a decision with report_age_s has capacity_bytes, occupancy and evicted_chunks")
        return self


class CallFields(Shape):
    """Of a row of calls.jsonl; see `replay.driver.CallRow`."""

    task: str
    call: Count
    prompt_tokens: Count
    status: str
    cached_tokens: Count | None
    dispatched_s: Number | None
    finished_s: Number | None

    @model_validator(mode="after")
    def _answered_in_time(self) -> CallFields:
        if self.status == "answered" and (self.dispatched_s is None or self.finished_s is None):
            raise ValueError("an answered call has dispatched_s and finished_s")
        return self


class OptionFields(Shape):
    """Of run.json's options: those of a replay or a simulation that are read again, with a replay's defaults."""

    trace: str
    model: str
    chunk_tokens: Positive
    time_scale: Number
    block_tokens: Positive = DEFAULT_BLOCK_TOKENS
    max_num_seqs: Positive = 16
    max_num_batched_tokens: Positive | None = None
    tensor_parallel: Positive = 1
    write_threshold_chunks: Count | None = None
    occupancy_threshold: Number | None = None
    activity_window_s: Number | None = None
    engines: Positive = 1
    link_gb_s: Number = 0.0


class TraceFields(Shape):
    """Of run.json's trace. One that could not be opened has a name only."""

    name: str
    sha256: str | None
    tasks: Count = 0
    calls: Count = 0
    prompt_tokens: Count = 0

    @model_validator(mode="after")
    def _counted_if_opened(self) -> TraceFields:
        if self.sha256 is not None and (missing := {"tasks", "calls", "prompt_tokens"} - self.model_fields_set):
            raise PydanticCustomError("shape", "lacks {names}", {"names": ", ".join(sorted(missing))})
        return self
