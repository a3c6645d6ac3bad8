"""JSON of strangers: what is counted before it is parsed, and what a parsed text cannot hold."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petalnode.crypto.bounded_json import BadJson, JsonLimits, check_json, parse_json, parse_json_object
from petalnode.crypto.safetensors_header import BadHeader, HeaderEntry, SafetensorsHeader, header_limits, parse_header

LIMITS = JsonLimits(nbytes=1 << 20, values=1000, depth=8)


def test_values_are_counted_outside_of_strings() -> None:
    prose = json.dumps({"text": '[1, 2], {"a": 3}: \\ "' * 10_000})
    assert parse_json_object(prose, LIMITS) == json.loads(prose)
    many = [{"role": "user", "content": "a, b: [c]"}] * 50
    assert parse_json(json.dumps(many), LIMITS) == many


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[]," * 2000 + "[]]",
        "[" + "{}," * 2000 + "{}]",
        "[" + "1," * 2000 + "1]",
        "{" + ",".join(f'"{key}":1' for key in range(600)) + "}",
        '["' + '","' * 2000 + '"]',
        "[]," * 9 + '"' * 10_000,
    ],
)
def test_too_many_values_are_not_parsed(text: str) -> None:
    with pytest.raises(BadJson, match="too much JSON"):
        check_json(text.encode(), LIMITS)


@pytest.mark.parametrize("text", ["[" * 9 + "]" * 9, '{"a":' * 9 + "1" + "}" * 9, "[" * 500_000])
def test_depth(text: str) -> None:
    with pytest.raises(BadJson, match=r"nests deeper|too much"):
        parse_json(text, LIMITS)
    assert parse_json("[" * 8 + "]" * 8, LIMITS)
    assert parse_json("[" + "[]," * 100 + "[]]", LIMITS)


@pytest.mark.parametrize("text", ["[]]", "[" * 8 + "]" * 9, '{"a":[}]}}'])
def test_who_closes_too_much_is_counted_no_further(text: str) -> None:
    with pytest.raises(BadJson, match="more brackets are closed"):
        check_json(f"{text}{'[' * 9}".encode(), LIMITS)


@pytest.mark.parametrize("text", ['["]",', '["\\"]",', '["\\\\",', '["\\\\\\"]",', '[{"[]":'])
def test_brackets_within_strings_close_nothing(text: str) -> None:
    with pytest.raises(BadJson, match="nests deeper than 8"):
        check_json((text * 9).encode(), LIMITS)


def test_each_string_but_first_stands_behind_value() -> None:
    none = JsonLimits(nbytes=100, values=0, depth=1)
    check_json(b'"[["', none)
    with pytest.raises(BadJson, match="too much JSON"):
        check_json(b'"[[" "[["', none)
    check_json(b'["[[","[["]', JsonLimits(nbytes=100, values=2, depth=1))


def test_length() -> None:
    with pytest.raises(BadJson, match="bytes"):
        parse_json(b" " * (LIMITS.nbytes + 1), LIMITS)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "nul", "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 65, "[1] 2", "\x00", '"\\'),
        *('"\\ud800"', '{"\\udfff": 1}', '{"a": 1, "a": 2}', '"' * 10_000),
    ],
)
def test_what_is_no_json_of_ours(text: str) -> None:
    with pytest.raises(BadJson):
        parse_json(text, LIMITS)


def test_encodings() -> None:
    assert parse_json('"ü"'.encode("utf-8-sig"), LIMITS) == "ü"
    for raw in ('"a"'.encode("utf-16"), b'"\xff"', b'"\xed\xa0\x80"'):
        with pytest.raises(BadJson):
            parse_json(raw, LIMITS)
    assert parse_json('"\\ud83d\\ude00"', LIMITS) == "😀"
    with pytest.raises(BadJson, match="object"):
        parse_json_object("[]", LIMITS)
    loose = JsonLimits(nbytes=100, values=10, strict=False)
    assert parse_json('{"a": 1, "a": 2}', loose) == {"a": 2}


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 60), 1 << 60)
    | st.text()
    | st.floats(allow_nan=False, width=32).filter(lambda number: abs(number) < 1e30),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@settings(max_examples=200)
@given(VALUES, st.booleans())
def test_json_within_the_limits_is_parsed_as_usual(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text, JsonLimits(len(text.encode()), values=1000, depth=40)) == value


@settings(max_examples=200)
@given(VALUES)
def test_the_count_is_that_of_values_and_keys(value: object) -> None:
    """Of the first value and of empty containers nothing is told by a comma, so the count is a bound from below."""

    def counted(value: object) -> int:
        if isinstance(value, dict):
            return 1 + sum(1 + counted(inner) for inner in value.values())
        return 1 + sum(map(counted, value)) if isinstance(value, list) else 1

    def nested(value: object) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(nested, inner), default=0)

    text = json.dumps(value).encode()
    exact = JsonLimits(len(text), values=2 * counted(value), depth=nested(value))
    check_json(text, exact)
    if nested(value):
        with pytest.raises(BadJson):
            check_json(text, JsonLimits(len(text), exact.values, exact.depth - 1))


def entry(shape: object, begin: object, end: object, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def header(**tensors: object) -> SafetensorsHeader:
    return parse_header(json.dumps(tensors).encode(), header_limits(10_000, 100))


def test_header_of_consecutive_tensors_is_read() -> None:
    found = header(b=entry([3, 2], 2, 26, "F32"), a=entry([1] * 16, 0, 1), c=entry([0], 1, 1), d=entry([2], 1, 2, "F4"))
    assert found.end == 26 and found.tensors["b"] == HeaderEntry("F32", (3, 2), 2, 26)


@pytest.mark.parametrize(
    "tensors",
    [
        [entry([1], 0, 1), entry([1], 0, 1)],
        [entry([1], 0, 1), entry([1], 2, 3)],
        [entry([1], 1, 2)],
        [entry([-1, -1], 0, 1)],
        [entry([1], -1, 0)],
        [entry([1] * 17, 0, 1)],
        [entry([1.0], 0, 1)],
        [entry([True], 0, 1)],
        [entry("1", 0, 1)],
        [entry([2], 0, 1)],
        [entry([1], 0, 1, "F16")],
        [entry([1], 0, 1, "TEXT")],
        [{"dtype": "U8", "shape": [1]}],
        [{"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}],
        [[]],
    ],
)
def test_a_header_that_is_damaged_is_refused(tensors: list[object]) -> None:
    with pytest.raises(BadHeader):
        header(**{f"tensor {number}": tensor for number, tensor in enumerate(tensors)})


@pytest.mark.parametrize("metadata", [{"a": 1}, ["a"], 1])
def test_metadata_of_a_header_are_texts(metadata: object) -> None:
    assert header(__metadata__={"a": "b"}).metadata == {"a": "b"} and header(__metadata__=None).metadata == {}
    with pytest.raises(BadHeader, match="metadata"):
        header(__metadata__=metadata)
