"""JSON that a stranger wrote, read within bounds: its length, its number of values and its depth are looked at first.

`json.loads` takes 160 ns and more for each `[]`, and keeps the interpreter for all of the text. So 18 MiB of `[],[],`
stop every thread of a node for 3 s. Here, what holds more than it may is refused as soon as that is counted.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.?+[^"\\]*+)*+"?|[,:\[\]{}]', re.DOTALL)
"""A string from any quotation mark on (whether it ends is the parser's matter), or what stands between values."""
_STRING, _OPENING, _CLOSING = ord('"'), frozenset(b"[{"), frozenset(b"]}")
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_LONGEST_NUMBER: Final = 64
"""Characters: int() takes quadratic time, and no field takes a number that has more."""


class BadJson(ValueError):
    """This is no JSON, or more of it than may be."""


@dataclass(frozen=True)
class JsonLimits:
    """What a text may have.

    Attributes:
        nbytes: of the text in UTF-8.
        values: of all levels, keys too; each comma, colon and opening bracket outside of strings counts as one.
        depth: of objects and arrays within each other.
        strict: whether a key may come only once in an object, and each number is finite. Without, the last of equal
            keys counts, as everywhere in Python: files that others than we have to read the same way.
    """

    nbytes: int
    values: int
    depth: int = 8
    strict: bool = True


def parse_json(data: bytes | str, limits: JsonLimits) -> Any:
    """What the text says.

    Raises:
        BadJson: it is no JSON in UTF-8, exceeds `limits`, or has a number of more than 64 characters. Or it has half of
            a pair of surrogates.
    """
    raw = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    check_json(raw, limits)
    try:
        text = raw.decode("utf-8-sig")
        hooks: dict[str, Any] = {"parse_float": float, "parse_int": _integer}
        if limits.strict:
            hooks |= {"object_pairs_hook": _object, "parse_float": _finite, "parse_constant": _finite}
        found = json.loads(text, **hooks)
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadJson(f"it is no JSON: {str(error)[:200]}") from None
    return found


def parse_json_object(data: bytes | str, limits: JsonLimits) -> dict[str, Any]:
    """As `parse_json`; raises BadJson if it is no object, too."""
    found = parse_json(data, limits)
    if not isinstance(found, dict):
        raise BadJson("it is no JSON object")
    return found


def read_json_object(file: Path, limits: JsonLimits) -> dict[str, Any]:
    """As `parse_json_object`, of a file, of which no more is read than it may have. Raises OSError, too."""
    with file.open("rb") as stream:
        data = stream.read(limits.nbytes + 1)
    return parse_json_object(data, limits)


def check_json(data: bytes, limits: JsonLimits) -> None:
    """Counts what a text has without parsing it, in linear time.

    Raises:
        BadJson: it exceeds the limits.
    """
    if len(data) > limits.nbytes:
        raise BadJson(f"its {len(data):,} bytes of JSON are too many: {limits.nbytes:,} at most")
    brackets = data.count(b"[") + data.count(b"{")
    if brackets <= limits.depth and brackets + data.count(b",") + data.count(b":") <= limits.values:
        return  # even if none of them stood in a string
    values = strings = depth = 0
    for token in _TOKEN.finditer(data):
        first = data[token.start()]
        if first == _STRING:
            strings += 1
        elif first in _CLOSING:
            depth -= 1
            if depth < 0:  # else millions of these were counted for nothing
                raise BadJson("it is no JSON: more brackets are closed than opened")
        else:
            values += 1
            if first in _OPENING:
                depth += 1
        # Each string but the first stands behind what was counted.
        if values > limits.values or strings > limits.values + 1:
            raise BadJson(f"it holds too much JSON: {limits.values:,} values at most")
        if depth > limits.depth:
            raise BadJson(f"it nests deeper than {limits.depth} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadJson("a key comes twice in one object")
    return found


def _integer(text: str) -> int:
    if len(text) > _LONGEST_NUMBER:
        raise BadJson("it has a number of too many digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise BadJson(f"it has a number that is not finite: {text[:20]}")
    return number
