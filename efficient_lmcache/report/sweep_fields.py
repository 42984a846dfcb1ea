"""What is read of a sweep.json, field by field; see `sweep.state.SweepState` and `sweep.predictions`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, model_validator
from pydantic_core import PydanticCustomError

from efficient_lmcache.replay.run_fields import Positive
from efficient_lmcache.replay.shapes import Count, Number, Shape


def _iso(value: str) -> str:
    try:
        aware = datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        aware = False
    if not aware:
        raise PydanticCustomError("time", "it must be a time like 2026-11-30T07:07:24+00:00")
    return value


Time = Annotated[str, AfterValidator(_iso)]


class SpanFields(Shape):
    """A prediction and what it may range over."""

    expected: Number
    low: Number
    high: Number


class PredictionFields(Shape):
    """Of one configuration. Those with a default are younger than the schema."""

    created_at: Time
    active_pool: Positive
    admission: str
    host_gib: Number
    capacity_chunks: Count | None
    computed_prefill_tokens: SpanFields
    restored_tokens_per_rank: SpanFields
    write_threshold_chunks: Count | None = None
    occupancy_threshold: Number | None = None
    stored_tokens_per_rank: SpanFields | None = None
    declined_calls: SpanFields | None = None
    makespan_s: SpanFields | None = None

    @model_validator(mode="before")
    @classmethod
    def _left_out_and_not_null(cls, fields: object) -> object:
        if isinstance(fields, dict):
            for name in ("stored_tokens_per_rank", "declined_calls", "makespan_s"):
                if name in fields and fields[name] is None:
                    raise PydanticCustomError("shape", "{name} is null", {"name": name})
        return fields


class SweepOptionFields(Shape):
    """Of a run's options."""

    connector: str = "efficient"


class SweepRunFields(Shape):
    """Of one run."""

    name: str
    directory: str
    repeat: Positive
    options: SweepOptionFields
    status: str
    prediction: Count | None
    started_at: Time | None


class SweepTraceFields(Shape):
    """Of the trace that is replayed."""

    name: str


class SweepFields(Shape):
    """Of the whole file."""

    name: str
    trace: SweepTraceFields
    runs: list[SweepRunFields]
    predictions: list[PredictionFields]

    @model_validator(mode="after")
    def _predictions_are_there(self) -> SweepFields:
        for run in self.runs:
            if run.prediction is not None and run.prediction >= len(self.predictions):
                wrong = {"name": run.name, "number": run.prediction}
                raise PydanticCustomError("shape", "runs: {name}: there is no prediction {number}", wrong)
        return self
