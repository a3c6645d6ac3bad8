"""No body of a request ends otherwise than parsed or refused, whatever stands in any of its fields."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petalnode.node.api import ollama as ollama
from petalnode.node.api.anthropic import parse_messages
from petalnode.node.api.errors import api_error, error_object
from petalnode.node.api.fields import Fields, parse_object
from petalnode.node.api.openai.requests import parse_chat, parse_completion
from petalnode.node.api.openai.responses import parse_response
from petalnode.node.errors import BadInput
from tests.api.bodies import BODIES, STRANGE, changed, encoded, places

PARSERS: Final[dict[str, Callable[[Fields], Any]]] = {
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
    "/v1/responses": parse_response,
    "/v1/messages": parse_messages,
    "/api/chat": ollama.parse_chat,
    "/api/generate": ollama.parse_generate,
}
PLACES: Final = [(path, place) for path in PARSERS for place in places(BODIES[path])]


def outcome(path: str, body: bytes) -> str:
    """The parameter that is refused; "parsed" if none is. Everything else that is raised is a fault."""
    raised: list[Exception] = []
    try:
        PARSERS[path](parse_object(body))
    except Exception as error:
        raised.append(error)
    if not raised:
        return "parsed"
    told = api_error(raised[0])
    assert told.status == 400, (path, body, raised)
    assert len(str(told)) < 1000
    json.dumps(error_object(told, path), ensure_ascii=False, allow_nan=False).encode()
    return str(told.param)


@pytest.mark.parametrize("path", PARSERS)
def test_every_field_with_every_strange_value(path: str) -> None:
    assert outcome(path, encoded(BODIES[path])) == "parsed"
    for place in places(BODIES[path]):
        for value in STRANGE:
            outcome(path, encoded(changed(BODIES[path], place, value)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(STRANGE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(PLACES), JSON)
def test_any_field_with_any_value(where: tuple[str, tuple[Any, ...]], value: Any) -> None:
    path, place = where
    outcome(path, encoded(changed(BODIES[path], place, value)))


NUMBERS: Final = {
    "/v1/chat/completions": ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "n", "seed"),
    "/v1/responses": ("temperature", "top_p", "top_logprobs", "max_output_tokens"),
    "/v1/messages": ("temperature", "top_p", "top_k", "max_tokens"),
}


@pytest.mark.parametrize("value", [10**60, -(10**60), 1e308, -1e308])
@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in NUMBERS.items() for name in names])
def test_a_number_out_of_range_names_its_field(path: str, name: str, value: float) -> None:
    assert outcome(path, encoded({**BODIES[path], name: value})) == name


def test_a_number_that_no_float_holds() -> None:
    """As a program may hand it over that does not read it from JSON."""
    for value in (10**400, -(10**400), sys.float_info.max, float("inf"), float("nan")):
        fields = Fields({"temperature": value, "n": value, "logit_bias": {"1": value}})
        for name in ("temperature", "n"):
            with pytest.raises(Exception, match=name):
                fields.number(name, 1.0, 0, 2)
        with pytest.raises(Exception, match="n: "):
            fields.integer("n", 0, 2)


def test_a_body_of_many_values_is_not_parsed() -> None:
    for filler in ("[],", "{},", "1,", '"",', '{"a":[]},'):
        many = f'{{"model": "x", "x": [{filler * (900_000 // len(filler))} 1]}}'.encode()
        with pytest.raises(Exception, match="too much JSON"):
            parse_object(many)
    long = json.dumps({"messages": [{"role": "user", "content": '[1, {2}], "\\ü\n' * 40_000}]}).encode()
    assert parse_object(long).get("messages")
    tokens = json.dumps({"prompt": [31_999] * 120_000}).encode()
    assert len(parse_object(tokens).get("prompt")) == 120_000


def test_bad_input_of_sampling_is_a_400() -> None:
    assert api_error(BadInput("x")).status == 400
