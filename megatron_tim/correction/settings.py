"""The base of every section of a configuration."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Settings(BaseModel):
    """A section of a configuration: keys that it does not know are refused, numbers are finite, true is no number."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (kind, *get_args(kind)):
            raise ValueError(f"{str(value).lower()} is no value for it; allowed: {_kind_in_words(kind)}")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("it holds a NUL character; remove it")
        return value


def _kind_in_words(kind: Any) -> str:
    return {int: "a whole number", float: "a number"}.get(next(iter(get_args(kind)), kind), "another kind of value")
