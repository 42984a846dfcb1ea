"""What the analyses read of a run's files: each field's kind, so that a garbled one is named where it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Count = Annotated[int, Field(ge=0, le=1 << 53)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class EstimateFields(_Shape):
    """`WorkingSetEstimate`."""

    active_pool: Count
    mean_prompt_tokens: Number
    bytes_per_token: Annotated[Count, Field(ge=1)]
    bytes: Number


class DecisionFields(_Shape):
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
    capacity_bytes: Number
    full_and_evicting: bool | None
    occupancy: Number | None
    evicted_chunks: Count | None
    report_age_s: Number | None

    @model_validator(mode="after")
    def _reported_whole(self) -> DecisionFields:
        if self.report_age_s is not None and (self.occupancy is None or self.evicted_chunks is None):
            raise ValueError("a decision with report_age_s has occupancy and evicted_chunks")
        return self


class CallFields(_Shape):
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


class OptionFields(_Shape):
    """Of run.json's options."""

    trace: str
    model: str
    chunk_tokens: Annotated[Count, Field(ge=1)]
    time_scale: Number
    write_threshold_chunks: Count | None = None
    occupancy_threshold: Number | None = None


class TraceFields(_Shape):
    """Of run.json's trace, once it has been opened."""

    name: str
    sha256: str
    tasks: Count
    calls: Count
    prompt_tokens: Count


def problem(row: Mapping[str, Any], fields: type[_Shape]) -> str | None:
    """What is wrong with a row: the fields that it lacks, or the first that is of another kind."""
    if missing := [name for name, field in fields.model_fields.items() if field.is_required() and name not in row]:
        return f"lacks {', '.join(missing)}"
    try:
        fields.model_validate(dict(row))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"{place} is {first['input']!r:.60}: {first['msg']}" if place else str(first["msg"])
    return None
