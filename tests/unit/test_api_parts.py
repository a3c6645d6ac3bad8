"""What `petalnode api` decides without a model or a network: stop strings, calls in a text, keys, sessions."""

from __future__ import annotations

import json
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.api.engine.choice import StopStrings
from petalnode.node.api.engine.conversations import reserved, suits
from petalnode.node.api.engine.generation import Grammar
from petalnode.node.api.engine.tools import ToolCall, ToolText, tool_form
from petalnode.node.api.errors import ApiError, api_error
from petalnode.node.api.fields import Fields
from petalnode.node.api.http.admission import ApiKeys, add_key
from petalnode.node.api.openai.requests import parse_chat, parse_completion
from petalnode.node.errors import BadInput, MachineError, NoChainError, SwarmError

HERMES, MISTRAL, LLAMA = (
    tool_form("tools " + mark) for mark in ("<tool_call>", "[TOOL_CALLS]", '{"name": x, "parameters": y}')
)


def fed(filter_: Any, text: str, cuts: list[int]) -> str:
    """What `filter_` lets through of `text` in pieces."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return "".join(filter_.feed(text[start:end]) for start, end in pairwise(places))


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.integers()))
def test_a_stop_string_cuts_wherever_the_pieces_end(text: str, stops: list[str], cuts: list[int]) -> None:
    filter_ = StopStrings(stops)
    shown = fed(filter_, text, cuts) + filter_.end()
    places = [text.find(stop) for stop in stops if stop in text]
    if not places:
        assert (shown, filter_.found) == (text, None)
    else:
        # Pieces may show that one string is there before an earlier, longer one is complete.
        assert text.startswith(shown)
        assert min(places) <= len(shown)
        assert filter_.found is not None and text[len(shown) :].startswith(filter_.found)


def test_only_a_possible_stop_string_is_held_back() -> None:
    filter_ = StopStrings(["STOP"])
    assert [filter_.feed(piece) for piece in ("abcS", "T", "X", "STO")] == ["abc", "", "STX", ""]
    assert filter_.end() == "STO"


ONE = '{"name": "look", "arguments": {"at": "ü"}}'
UNKNOWN = '<tool_call>\n{"name": "other", "arguments": {}}'
CALL = ("look", {"at": "ü"})


def calls_of(calls: list[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("form", "text", "shown", "calls"),
    [
        (HERMES, f"<tool_call>\n{ONE}\n</tool_call>", "", [CALL]),
        (HERMES, f"I look.\n\n<tool_call>{ONE}</tool_call>\n<tool_call>\n{ONE}\n</tool_call>", "I look.", [CALL, CALL]),
        (HERMES, "no call < tool", "no call < tool", []),
        (HERMES, "<tool_call>\n{broken", "<tool_call>\n{broken", []),
        (HERMES, UNKNOWN, UNKNOWN, []),
        (MISTRAL, f"[TOOL_CALLS][{ONE}, {ONE}]", "", [CALL, CALL]),
        (LLAMA, ONE.replace("arguments", "parameters"), "", [CALL]),
        (LLAMA, "plain {text}", "plain {text}", []),
        (LLAMA, '{"name": ["look"]}', '{"name": ["look"]}', []),
        (LLAMA, '{"name": "look", "parameters": 1e999}', '{"name": "look", "parameters": 1e999}', []),
        (LLAMA, '{"name": "look", "parameters": "\\ud800"}', '{"name": "look", "parameters": "\\ud800"}', []),
        (None, "<tool_call>", "<tool_call>", []),
    ],
)
@given(cuts=st.lists(st.integers(0, 200)))
def test_calls_are_found_wherever_the_pieces_end(
    form: Any, text: str, shown: str, calls: list[Any], cuts: list[int]
) -> None:
    filter_ = ToolText(form, ["look"])
    passed = fed(filter_, text, cuts)
    rest, found = filter_.end()
    assert (passed + rest, calls_of(found)) == (shown, calls)


def test_templates_without_tools_have_no_form() -> None:
    assert tool_form("{{ messages }}") is None
    assert tool_form("{{ tools }} in a form of its own") is None


def test_key_is_shown_once_and_kept_as_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of this house\n\n")
    keys = [add_key(file, name) for name in ("alice", "bob of the house")]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not any(key in file.read_text() for key in keys)
    known = ApiKeys.read(file)
    assert [known.owner(key) for key in keys] == ["alice", "bob of the house"]
    assert known.owner(keys[0][:-1]) is None
    assert known.owner("\udcff") is None
    assert len(set(keys)) == 2 and all(len(key) > 40 for key in keys)


@pytest.mark.parametrize("text", ["", "# nothing\n", "pn-a-key-as-it-is\n", "sha256:abc alice\n", "\udcff"])
def test_a_file_that_has_no_hashes_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadInput, match="keys"):
        ApiKeys.read(file)


def test_a_key_needs_a_name_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        add_key(tmp_path / "keys", "a\nsha256:" + "0" * 64)
    with pytest.raises(BadInput, match="--new-api-key"):
        ApiKeys.read(tmp_path / "none")
    with pytest.raises((MachineError, BadInput)):
        ApiKeys.read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match=r"cannot write .*keys"):
        add_key(tmp_path / "file" / "keys", "alice")


@given(st.integers(1, 10_000), st.integers(16, 8192))
def test_a_session_has_room_for_what_follows(needed: int, context: int) -> None:
    tokens = reserved(needed, context)
    assert tokens >= needed
    assert tokens <= max(needed, min(context, max(256, 2 * needed)))


def test_which_conversation_a_request_goes_on_with() -> None:
    assert suits(held=100, shared=100)
    assert suits(held=100, shared=50)  # its last answer is made anew
    assert not suits(held=100, shared=49)
    assert not suits(held=0, shared=0)


def chat(**fields: Any) -> Any:
    return parse_chat(Fields({"messages": [{"role": "user", "content": "x"}], **fields}))


def test_forms_of_answers() -> None:
    schema = {"type": "object"}
    strict = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert chat(response_format=strict).text.grammar == Grammar("json_schema", json.dumps(schema))
    assert chat(response_format={"type": "json_object"}).text.grammar.kind == "json_object"
    assert chat(response_format={"type": "text"}).text.grammar is None
    assert chat(guided_regex="a+").text.grammar == Grammar("regex", "a+")
    for wrong in (
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "xml"}},
        {"response_format": strict, "guided_regex": "a"},
        {"guided_choice": []},
        {"guided_choice": [""]},
        {"guided_regex": "a" * 200_000},
    ):
        with pytest.raises(ApiError):
            chat(**wrong)


def test_messages_as_templates_take_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    parsed = parse_chat(
        Fields(
            {
                "messages": [
                    {"role": "developer", "content": "be brief"},
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "1", "content": "seen"},
                ]
            }
        )
    ).messages
    assert parsed[0] == {"role": "system", "content": "be brief"}
    assert parsed[1]["content"] == "ab"
    assert parsed[2]["tool_calls"][0]["function"]["arguments"] == {"at": 1}
    assert parsed[3]["tool_call_id"] == "1"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "robot", "content": "x"},
        {"role": 1, "content": "x"},
        {"content": "x"},
        {"role": "user", "content": {"text": "x"}},
        {"role": "user", "content": [{"text": "x"}]},
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]},
    ],
)
def test_messages_that_are_none_are_refused_by_name(message: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as raised:
        parse_chat(Fields({"messages": [message]}))
    assert raised.value.status == 400
    assert raised.value.param is not None
    assert raised.value.param.startswith("messages[0].")


def test_fields_are_read_typed_or_refused_by_name() -> None:
    for name, value in (
        *(("temperature", wrong) for wrong in ("1", True, -0.1, 1000, float("nan"))),
        *(("seed", wrong) for wrong in (1.5, True, 1 << 70)),
        ("stream", "yes"),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("n", 0),
        ("top_p", -0.1),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": "1"}),
        ("max_tokens", 0),
        ("top_logprobs", 3),
        ("modalities", ["audio"]),
        ("functions", [{"name": "x"}]),
    ):
        with pytest.raises(ApiError) as raised:
            chat(**{name: value})
        assert (raised.value.param or "").startswith(name), name
    assert chat(temperature=None, stop=None, n=None).text.choices == 1
    assert chat(max_completion_tokens=5, max_tokens=9).text.max_tokens == 5


def test_prompts() -> None:
    def prompts(prompt: Any) -> Any:
        return parse_completion(Fields({"prompt": prompt})).prompts

    assert prompts("a") == ("a",)
    assert prompts([1, 2]) == ((1, 2),)
    assert prompts(["a", "b"]) == ("a", "b")
    assert prompts([[1], [2, 3]]) == ((1,), (2, 3))
    for wrong in (None, 1, [], [[]], [1, "a"], ["a", [1]], [True], ["a"] * 17, {"a": 1}):
        with pytest.raises(ApiError):
            prompts(wrong)


def test_errors_have_their_status() -> None:
    missing = api_error(NoChainError("blocks 2:4 are missing", (2, 3)))
    assert (missing.status, missing.fields()["error"]["missing_blocks"]) == (503, [2, 3])
    assert "Retry-After" in missing.headers
    assert api_error(SwarmError("x")).status == 503
    assert api_error(BadInput("x")).status == 400
    fault = api_error(RuntimeError("a secret of the program"))
    assert (fault.status, fault.kind) == (500, "server_error")
    assert "secret" not in json.dumps(fault.fields())
