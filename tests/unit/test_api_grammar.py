"""Answers that are bound to a form, with logits at random: whatever a model prefers, the form is kept."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petalnode.node.api.engine.generation import Grammar, GrammarKind
from petalnode.node.api.engine.grammar import (
    AnyConstraint,
    GrammarConstraint,
    Grammars,
    only_bit,
)
from petalnode.node.api.engine.tools import call_grammar, grammar_after_mark, tool_form
from petalnode.node.api.errors import ApiError
from petalnode.node.client.generation.sampling import Sampler, Sampling
from tests.api.tokenizer import EOS, save_api_tokenizer
from tests.tiny_models import VOCABULARY

MARKS = ("<tool_call>", "</tool_call>")
HERMES = tool_form("tools <tool_call>")
MISTRAL = tool_form("tools [TOOL_CALLS]")
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"enum": ["a", "b"]}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("x", "yy")]


def tokenizer(folder: Path, special: tuple[str, ...] = ()) -> Any:
    from transformers import AutoTokenizer

    save_api_tokenizer(folder, special)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With the marks of calls as special tokens."""
    return tokenizer(tmp_path_factory.mktemp("marked"), MARKS)


def special_of(loaded: Any) -> Any:
    ids = {added.content: token for token, added in loaded.added_tokens_decoder.items() if added.special}
    return ids.get


def answer(constraint: AnyConstraint, seed: int, most: int = 400) -> list[int]:
    """Tokens of an answer to which a model has no inclination, up to the one that ends it."""
    random = torch.Generator().manual_seed(seed)
    sampler, made = Sampler(Sampling(temperature=1.0, seed=seed), constraint), list[int]()
    while len(made) < most and not constraint.done:
        token = sampler.next(made, torch.randn(VOCABULARY, generator=random))
        if token == EOS:
            break
        made.append(token)
    return made


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("regex", "(ab|c){2,3}[0-9]", "(ab|c){2,3}[0-9]"),
        ("choice", json.dumps(["red", 'a "b"', "x\\y"]), 'red|a "b"|x\\\\y'),
        ("json_schema", json.dumps(PARAMETERS), '\\{"at": "[ab]"\\}'),
        ("json_schema", json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}), "\\[.*\\]"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_an_answer_keeps_its_form(kind: GrammarKind, text: str, expected: str, seed: int, plain: Any) -> None:
    grammars = Grammars(plain, VOCABULARY, (EOS,))
    made = answer(grammars.constraint(grammars.compiled(Grammar(kind, text))), seed)
    assert re.fullmatch(expected, plain.decode(made)), plain.decode(made)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(((("),
        ("json_schema", '{"type": "nonsense"}'),
        ("json_schema", '{"$ref": "https://example.org/schema"}'),
        ("json_schema", '{"type": "string", "pattern": "(?=look)ahead"}'),
    ],
)
def test_a_form_that_cannot_be_kept_is_refused(kind: GrammarKind, text: str, plain: Any) -> None:
    grammars = Grammars(plain, VOCABULARY, (EOS,))
    with pytest.raises(ApiError) as raised:
        grammars.constraint(grammars.compiled(Grammar(kind, text)))
    assert (raised.value.status, raised.value.code) == (400, "invalid_schema")


class BusyMatcher:
    """A matcher that computes until it is told to go on, and may not be asked anything meanwhile."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.computing = False

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self.computing = True
        self.begun.set()
        assert self.go_on.wait(timeout=600)
        self.computing = False

    def is_stopped(self) -> bool:
        assert not self.computing, "Already mutably borrowed"
        return False

    is_error = is_accepting = is_stopped

    def consume_token(self, token: int) -> None:
        self.is_stopped()


def test_late_mask_is_in_nobodys_way() -> None:
    """A thread that was to compute the mask of the token before begins when that has been chosen."""
    matcher = BusyMatcher()
    constraint = GrammarConstraint(matcher, 64)
    constraint.accept(1)
    late = threading.Thread(target=constraint.prepare)
    late.start()
    assert matcher.begun.wait(timeout=600)
    assert not constraint.done
    asked: list[bool] = []
    other = threading.Thread(target=lambda: asked.append(constraint.complete))
    other.start()
    matcher.go_on.set()
    late.join()
    other.join()
    assert asked == [False]
    constraint.accept(2)


def test_masks_that_take_little_are_computed_in_place(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After four quick ones in a row; one that took long needs another thread again."""
    seconds = iter([0.0, 0.0] * 4 + [0.0, 1.0] + [0.0, 0.0] * 3)
    monkeypatch.setattr("petalnode.node.api.engine.grammar.time.thread_time", lambda: next(seconds))
    grammars = Grammars(plain, VOCABULARY, (EOS,))
    constraint = grammars.constraint(grammars.compiled(Grammar("regex", "[ab]+")))
    (letter,) = plain("a", add_special_tokens=False)["input_ids"]
    quick = []
    for _ in range(8):
        assert not constraint.is_ready and constraint.only is None
        constraint.prepare()
        assert constraint.is_ready and constraint.only is None  # a or b
        quick.append(constraint.is_quick)
        constraint.accept(letter)
    assert quick == [False] * 3 + [True] + [False] * 4


def test_the_only_token_that_may_follow_is_known(plain: Any) -> None:
    grammars = Grammars(plain, VOCABULARY, (EOS,))
    constraint = grammars.constraint(grammars.compiled(Grammar("regex", "a")))
    for expected in (plain("a", add_special_tokens=False)["input_ids"][0], EOS):
        assert not constraint.done
        constraint.prepare()
        assert constraint.only == expected
        scores = torch.zeros(VOCABULARY)
        constraint.apply(scores)
        assert (scores == 0).nonzero().tolist() == [[expected]]
        if expected != EOS:
            constraint.accept(expected)
        if constraint.done:
            break


@pytest.mark.parametrize("bits", [[], [0], [31], [32], [63], [3, 4], [3, 40]])
def test_a_mask_of_one_bit(bits: list[int]) -> None:
    mask = np.zeros(64, dtype=np.uint8)
    mask[bits] = 1
    only = only_bit(np.packbits(mask, bitorder="little").view(np.int32))
    assert only == (bits[0] if len(bits) == 1 else None)


def test_bound_part_is_made_ready_by_any_preparer(plain: Any) -> None:
    """Making it may take long: not where a token is accepted, and an error is told where the mask is needed."""
    made: list[int] = []

    class Twice(Grammars):
        """Cannot make it two times; every token of its vocabulary is the mark."""

        def constraint(self, grammar: str) -> GrammarConstraint:
            made.append(1)
            if len(made) < 3:
                raise ApiError(400, "no")
            return super().constraint(grammar)

        def text(self, token: int) -> str:
            return "<"

    grammars = Twice(plain, VOCABULARY, (EOS,))
    constraint = grammars.constraint_after("<", grammars.compiled(Grammar("choice", '["a"]')))
    assert constraint.is_ready and constraint.is_quick and constraint.only is None
    constraint.accept(1)
    assert not made and not constraint.is_ready and not constraint.is_quick
    constraint.prepare()
    assert not constraint.is_ready
    with pytest.raises(ApiError):
        constraint.apply(torch.zeros(VOCABULARY))
    constraint.prepare()
    assert constraint.is_ready and constraint.only == plain("a", add_special_tokens=False)["input_ids"][0]


def calls_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(call) for call in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text)]


@pytest.mark.parametrize("which", ["plain", "marked"])
@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_is_wanted_is_one(which: str, seed: int, request: pytest.FixtureRequest) -> None:
    loaded = request.getfixturevalue(which)
    grammars = Grammars(loaded, VOCABULARY, (EOS,))
    assert HERMES is not None
    wanted = call_grammar(HERMES, TOOLS, special_of(loaded), only="yy" if seed else None, many=False)
    made = answer(grammars.constraint(grammars.checked(wanted)), seed)
    text = loaded.decode(made, skip_special_tokens=False)
    (call,) = calls_in(text)
    assert text == f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    assert call["name"] in (("yy",) if seed else ("x", "yy"))
    assert call["arguments"]["at"] in ("a", "b")
    ids = [special_of(loaded)(mark) for mark in MARKS]
    assert which == "plain" or [token for token in made if token in ids] == ids


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "object", "properties": {}},
        {
            "title": "f",
            "properties": {"a": {"type": "boolean"}, "b": {"$ref": "#/$defs/b"}},
            "$defs": {"b": {"const": 1}},
        },
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_arguments_that_nothing_names_are_not_made_up(parameters: dict[str, Any], seed: int, plain: Any) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in "xy"[: seed + 1]]
    grammars = Grammars(plain, VOCABULARY, (EOS,))
    for form in (HERMES, MISTRAL):
        assert form is not None
        wanted = call_grammar(form, tools, special_of(plain), only=None, many=False)
        text = plain.decode(answer(grammars.constraint(grammars.checked(wanted)), seed))
        (call,) = calls_in(text) if form is HERMES else json.loads(text.removeprefix("[TOOL_CALLS]"))
        assert set(call["arguments"]) <= set(parameters.get("properties", ()))


@pytest.mark.parametrize("more", [{"additionalProperties": {"type": "boolean"}}, {"minProperties": 1}])
def test_unnamed_arguments_need_a_schema_that_names_them(more: dict[str, Any]) -> None:
    assert HERMES is not None
    tools = [{"type": "function", "function": {"name": "x", "parameters": {"type": "object", **more}}}]
    assert f'"arguments": {json.dumps(tools[0]["function"]["parameters"])}' in call_grammar(
        HERMES, tools, lambda text: None, only=None, many=False
    )


def test_a_list_of_calls(plain: Any) -> None:
    grammars = Grammars(plain, VOCABULARY, (EOS,))
    assert MISTRAL is not None
    wanted = call_grammar(MISTRAL, TOOLS, special_of(plain), only=None, many=False)
    text = plain.decode(answer(grammars.constraint(grammars.checked(wanted)), 1))
    (call,) = json.loads(text.removeprefix("[TOOL_CALLS]"))
    assert call["arguments"]["at"] in ("a", "b")


@pytest.mark.parametrize("which", ["plain", "marked"])
def test_call_is_bound_once_model_begins_one(which: str, request: pytest.FixtureRequest) -> None:
    """Before its mark and behind its end the model says what it likes, and may call again."""
    loaded = request.getfixturevalue(which)
    grammars = Grammars(loaded, VOCABULARY, (EOS,))
    assert HERMES is not None
    wanted = grammars.checked(grammar_after_mark(HERMES, TOOLS, special_of(loaded), many=True))
    constraint = grammars.constraint_after(HERMES.mark, wanted)
    random = torch.Generator().manual_seed(3)
    said: list[int] = []
    for free in ("I look <tool_cal <tool_call>", " and again: <tool_call>"):
        for token in loaded(free, add_special_tokens=False)["input_ids"]:
            scores = torch.zeros(VOCABULARY)
            constraint.apply(scores)
            assert not scores.any()  # nothing is forbidden
            constraint.accept(token)
            said.append(token)
        while not loaded.decode(said, skip_special_tokens=False).endswith("</tool_call>"):
            scores = torch.randn(VOCABULARY, generator=random)
            constraint.apply(scores)
            constraint.accept(int(scores.argmax()))
            said.append(int(scores.argmax()))
            assert len(said) < 400
    text = loaded.decode(said, skip_special_tokens=False)
    found = [json.loads(call) for call in re.findall(r"<tool_call>\n?(\{.*?\})\n</tool_call>", text)]
    assert len(found) == 2
    assert all(call["name"] in ("x", "yy") and call["arguments"]["at"] in ("a", "b") for call in found)
