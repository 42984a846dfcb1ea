"""Stored records, checked: what each field may be, so that a garbled one is named where it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

Count = Annotated[int, Field(ge=0, le=1 << 53)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def one_of(allowed: Sequence[str]) -> AfterValidator:
    """A text that is one of these."""

    def check(value: str) -> str:
        if value not in allowed:
            raise PydanticCustomError("one_of", "allowed are {allowed}", {"allowed": ", ".join(allowed)})
        return value

    return AfterValidator(check)


class Shape(BaseModel):
    """Fields of a row; others beside them are let be."""

    model_config = ConfigDict(strict=True, frozen=True)


def of_shape(fields: type[Shape]) -> AfterValidator:
    """A dictionary that has these fields, and whatever else."""

    def check(row: dict[str, Any]) -> dict[str, Any]:
        try:
            fields.model_validate(row)
        except ValidationError as error:
            raise PydanticCustomError("shape", "{wrong}", {"wrong": problem(error)}) from error
        return row

    return AfterValidator(check)


def problem(error: ValidationError) -> str:
    """What is wrong, in one line: the fields that are missing, else the first that is of another kind."""
    errors = error.errors(include_url=False)
    if missing := [_place(each["loc"]) for each in errors if each["type"] == "missing"]:
        return f"lacks {', '.join(missing)}"
    first = errors[0]
    place, message = _place(first["loc"]), first["msg"]
    if not place:
        return message
    return f"{place}: {message}" if first["type"] == "shape" else f"{place} is {first['input']!r:.60}: {message}"


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))
