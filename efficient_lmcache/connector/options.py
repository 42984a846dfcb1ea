"""The `efficient.*` options of `kv_connector_extra_config`, validated at start-up."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PREFIX = "efficient."


class OptionError(ValueError):
    """An option that is unknown or out of range; the message names key, value and what is allowed."""


class ConnectorOptions(BaseModel):
    """Defaults are the paper's (Table 7)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    admission: Literal["none", "fixed", "conditioned"] = Field(
        "conditioned",
        description="Write admission. `none`: plain LMCache. `fixed`: decline every refill. "
        "`conditioned`: decline refills while the working set exceeds a full, evicting tier.",
    )
    write_threshold_chunks: int = Field(
        8, ge=0, description="kappa: a request that needs more new full chunks than this is a refill."
    )
    occupancy_threshold: float = Field(
        0.95, ge=0.0, le=1.0, description="theta: the tier counts as full from this share of its chunks on."
    )
    activity_window_s: float = Field(
        60.0, gt=0.0, description="A task is active, and an eviction counts, for so many seconds."
    )
    prompt_window_lookups: int = Field(
        256, ge=1, description="First lookups whose prompts enter the mean prompt length."
    )
    report_interval_s: float = Field(1.0, gt=0.0, description="Seconds between two tier reports of worker rank 0.")
    report_read_interval_s: float = Field(0.5, gt=0.0, description="The scheduler reads reports at most this often.")
    report_max_age_s: float = Field(5.0, gt=0.0, description="A report is fresh for so many seconds after its receipt.")
    telemetry: Literal["local", "off"] = Field(
        "local", description="Transport of tier reports. `off`: decide by the working-set estimate alone."
    )
    decision_log: str | None = Field(None, description="File that receives every admission decision as a line of JSON.")


def parse_options(extra_config: Mapping[str, Any]) -> ConnectorOptions:
    """Read the `efficient.*` keys of `kv_connector_extra_config`; other keys belong to vLLM and LMCache.

    Raises:
        OptionError: for the first bad option, naming its key and value and what is allowed.
    """
    given = {key[len(PREFIX) :]: value for key, value in extra_config.items() if key.startswith(PREFIX)}
    try:
        return ConnectorOptions(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise OptionError(_message(name, given.get(name), first)) from None


def _message(name: str, value: Any, error: Any) -> str:
    if error["type"] == "extra_forbidden":
        known = ", ".join(PREFIX + option for option in ConnectorOptions.model_fields)
        return f"kv_connector_extra_config: {PREFIX}{name}={value!r} is not an option; allowed: {known}"
    return f"kv_connector_extra_config: {PREFIX}{name}={value!r} is not allowed; allowed: {allowed_values(name)}"


def allowed_values(name: str) -> str:
    """What an option accepts, in words, for errors and for the reference."""
    field = ConnectorOptions.model_fields[name]
    choices = typing.get_args(field.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(choices)
    names = {int: "an integer", float: "a number", str: "a string", type(None): "null"}
    kinds = " or ".join(names[kind] for kind in (choices or (field.annotation,)))
    symbols = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{symbol} {getattr(limit, attribute):g}"
        for limit in field.metadata
        for attribute, symbol in symbols.items()
        if hasattr(limit, attribute)
    ]
    return " ".join([kinds, " and ".join(bounds)]).strip()
