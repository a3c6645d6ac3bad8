"""Reading the JSON object of a request: each field with its type and its range, or an error that names it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...crypto.bounded_json import BadJson, JsonLimits, parse_json, parse_json_object
from .errors import ApiError


@dataclass(frozen=True)
class BodyLimits:
    """What a JSON body may have before it is parsed."""

    max_bytes: int = 1 << 20
    """Of a request, unless `petalnode api --max-body` allows more."""
    max_depth: int = 64
    bytes_per_value: int = 8
    """What a long body has to have for each value: 131,072 values of 1 MiB are parsed in 50 ms, whatever they are."""
    shown: int = 40
    """Characters of a number that cannot be used."""


BODY: Final = BodyLimits()


def json_limits(size: int = BODY.max_bytes) -> JsonLimits:
    """Of a request's body of `max_bytes` at most."""
    return JsonLimits(size, max(size // BODY.bytes_per_value, 4096), BODY.max_depth)


def parse_object(body: bytes, size: int = BODY.max_bytes) -> Fields:
    """
    Args:
        size: that a body may have.

    Raises:
        ApiError: the body is no JSON object, or one that has too many values, or nests too deep.
    """
    try:
        return Fields(parse_json_object(body, json_limits(size)))
    except BadJson as error:
        raise ApiError(400, f"the body: {error}", code="invalid_json") from None


def parse_text(fields: Fields, name: str, default: str) -> Any:
    """The value of a field that is JSON in a text. Raises ApiError."""
    try:
        return parse_json(fields.text(name, default) or default, json_limits())
    except BadJson as error:
        raise fields.wrong(name, str(error)) from None


def wrong(name: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """The error of a field whose value cannot be used; None for what is no field."""
    return ApiError(400, message, param=name, code=code)


class Fields:
    """The fields of a JSON object; null is as good as absent.

    Args:
        path: stands before the names in errors.
        told: the names in errors where they are others.
    """

    def __init__(self, data: Mapping[str, Any], path: str = "", told: Mapping[str, str] | None = None) -> None:
        self.data = data
        self._path = path
        self._told = told or {}

    def path(self, name: str) -> str:
        return f"{self._path}{self._told.get(name, name)}"

    def translated(self, told: Mapping[str, str], same: Collection[str], **others: Any) -> Fields:
        """The fields `same` of this object, which are called as `told` has it here and in errors, and `others`."""
        return Fields({name: self.get(told.get(name, name)) for name in same} | others, self._path, told)

    def get(self, name: str) -> Any:
        return self.data.get(name)

    def wrong(self, name: str, message: str, code: str = "invalid_value") -> ApiError:
        return wrong(self.path(name), f"{self.path(name)}: {message}", code)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number is expected")
        if not low <= value <= high:  # which is false of NaN, and exact for integers that no float holds
            raise self.wrong(name, f"{str(value)[: BODY.shown]} is out of range: from {low:g} to {high:g}")
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "an integer is expected")
        if not low <= value <= high:
            raise self.wrong(name, f"{str(value)[: BODY.shown]} is out of range: from {low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false is expected")
        return bool(value)

    def text(self, name: str, default: str | None = None) -> str:
        """
        Raises:
            ApiError: it is no text, or absent without a default.
        """
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a text is expected" if value is not None else "it is missing", "missing_field")
        return value

    def one_of(self, name: str, values: Collection[str], default: str) -> str:
        value = self.text(name, default)
        if value not in values:
            raise self.wrong(name, f"{value[:100]!r} is not one of {', '.join(values)}")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A text, or a list of up to `most` texts."""
        value = self.get(name)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
            raise self.wrong(name, "a text or a list of texts is expected")
        if len(values) > most:
            raise self.wrong(name, f"{len(values)} are too many: {most} at most")
        return tuple(values)

    def object(self, name: str) -> Fields | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object is expected")
        return Fields(value, f"{self.path(name)}.")

    def needed(self, name: str) -> Fields:
        """As `object`, of a field that may not be absent. Raises ApiError."""
        found = self.object(name)
        if found is None:
            raise self.wrong(name, "it is missing", "missing_field")
        return found

    def objects(self, name: str, most: int) -> list[Fields]:
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(name, "a list of objects is expected")
        if len(value) > most:
            raise self.wrong(name, f"{len(value)} are too many: {most} at most")
        return [Fields(item, f"{self.path(name)}[{index}].") for index, item in enumerate(value)]

    def refuse(self, **unsupported: str) -> None:
        """Refuses fields that would change the answer and are not done here, with the reason."""
        for name, reason in unsupported.items():
            if self.get(name) not in (None, False, [], {}):
                raise self.wrong(name, reason, "unsupported_parameter")
