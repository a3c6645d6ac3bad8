"""Calls of tools, in the form that the model's own chat template teaches it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .grammar import JSON_FORM


@dataclass(frozen=True)
class ToolForm:
    """How a family of models writes a call: `begin`, a JSON object with the name and `arguments`, `end`."""

    begin: str
    end: str
    arguments: str = "arguments"
    listed: bool = False

    @property
    def mark(self) -> str:
        """By which a call is known to begin; empty if only the whole answer tells."""
        return self.begin.strip()


_HERMES: Final = ToolForm("<tool_call>\n", "\n</tool_call>")
_MISTRAL: Final = ToolForm("[TOOL_CALLS]", "", listed=True)
_LLAMA: Final = ToolForm("", "", "parameters")
_NAMING: Final = frozenset(
    {"type", "properties", "required", "title", "description", "$schema", "$defs", "definitions", "default", "examples"}
)
"""Keywords of a schema that say nothing about properties without a name."""


@dataclass(frozen=True)
class ToolCall:
    """What the model calls. `arguments` are JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def tool_form(template: str) -> ToolForm | None:
    """The form that a chat template (Jinja) teaches. None if it takes no tools, or teaches one that is not known."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return _HERMES
    if "[TOOL_CALLS]" in template:
        return _MISTRAL
    return _LLAMA if '"parameters"' in template else None


SpecialToken = Callable[[str], int | None]
"""The id of the special token with this text; None if there is none."""


def call_grammar(
    form: ToolForm, tools: Sequence[dict[str, Any]], special: SpecialToken, *, only: str | None, many: bool
) -> str:
    """A grammar (Lark, as llguidance has it) of one call, or of one and more.

    Args:
        only: the one function that may be called.
        many: whether several calls may follow each other.
    """
    body = " ".join(part for part in (_literal(form.begin, special), "call", _literal(form.end, special)) if part)
    again = ' ("\\n" one)*' if many and form.begin and not form.listed else ""
    return f"start: one{again}\none: {body}\n{_call_rule(form, tools, only, many)}"


def grammar_after_mark(form: ToolForm, tools: Sequence[dict[str, Any]], special: SpecialToken, *, many: bool) -> str:
    """A grammar of what follows `form.mark`, once the model has written that."""
    blank = '"\\n"? ' if form.begin.endswith("\n") else ""
    return f"start: {blank}call {_literal(form.end, special)}\n{_call_rule(form, tools, None, many)}"


def _call_rule(form: ToolForm, tools: Sequence[dict[str, Any]], only: str | None, many: bool) -> str:
    functions = [tool["function"] for tool in tools if only in (None, tool["function"]["name"])]
    place = "#/items" if form.listed else "#"
    schema: dict[str, Any]
    if len(functions) == 1:
        schema = _call_schema(form, functions[0], place)
    else:
        schema = {"anyOf": [_call_schema(form, one, f"{place}/anyOf/{index}") for index, one in enumerate(functions)]}
    if form.listed:
        schema = {"type": "array", "items": schema, "minItems": 1, **({} if many else {"maxItems": 1})}
    return f"call: %json {json.dumps({'x-guidance': JSON_FORM, **schema})}"


def _literal(text: str, special: SpecialToken) -> str:
    """`text` in a grammar: what is a special token of the model is that, and not its letters."""
    mark = text.strip()
    token = special(mark) if mark else None
    if token is None:
        return _quoted(text)
    before, _, behind = text.partition(mark)
    return " ".join(part for part in (_quoted(before), f"<[{token}]>", _quoted(behind)) if part)


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _call_schema(form: ToolForm, function: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema of a call, which will stand at `place` (a JSON pointer) of another one."""
    arguments = _moved(_arguments(function["parameters"]), f"{place}/properties/{form.arguments}")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, form.arguments: arguments},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


def _arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments: what it does not name is no argument, unless it speaks of others.

    JSON Schema lets any pass, and a model would make some up.
    """
    if not _NAMING.issuperset(parameters):
        return parameters
    return {**parameters, "type": "object", "additionalProperties": False}


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to parts of itself (`#/$defs/...`) as they are where it stands at `place`."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: f"{place}{item[1:]}"
        if name == "$ref" and isinstance(item, str) and item.startswith("#")
        else _moved(item, place)
        for name, item in schema.items()
    }


class ToolText:
    """An answer as it comes, in which calls may stand: text before the first call passes, the rest is kept.

    Args:
        form: None lets everything pass.
    """

    def __init__(self, form: ToolForm | None, names: Sequence[str]) -> None:
        self._form = form
        self._names = tuple(names)
        # Without a mark, only the whole answer tells whether it is a call: one begins with a brace.
        self._mark = (form.begin.strip() or "{") if form is not None else ""
        self._at_start = form is not None and not form.begin
        self._kept = ""
        self._calls = False

    def feed(self, text: str) -> str:
        """What can be shown of it."""
        if not self._mark:
            return text
        self._kept += text
        if self._calls:
            return ""
        place = self._kept.find(self._mark)
        if place >= 0 and not (self._at_start and self._kept[:place].strip()):
            self._calls = True
            shown, self._kept = self._kept[:place], self._kept[place:]
            return shown.rstrip() if shown.strip() else ""
        if self._at_start and self._kept.strip():
            self._mark = ""  # it has begun with something else
        keep = 0 if not self._mark else self._overlap()
        shown, self._kept = self._kept[: len(self._kept) - keep], self._kept[len(self._kept) - keep :]
        return shown

    def end(self) -> tuple[str, list[ToolCall]]:
        """What is left to be shown, and the calls."""
        kept, self._kept = self._kept, ""
        if not self._calls or self._form is None:
            return kept, []
        calls = _parsed(self._form, kept, self._names)
        return ("", calls) if calls else (kept, [])

    def _overlap(self) -> int:
        mark, text = self._mark, self._kept
        sizes = range(min(len(text), len(mark) - 1), 0, -1)
        marked = next((size for size in sizes if text.endswith(mark[:size])), 0)
        before = text[: len(text) - marked]
        return marked + len(before) - len(before.rstrip())  # blank lines before a call are not shown


def _parsed(form: ToolForm, text: str, names: tuple[str, ...]) -> list[ToolCall]:
    """The calls in a text; empty if any of it is none, or has what no JSON for a client can have."""
    calls, begin = [], form.begin.strip()
    decoder = json.JSONDecoder()
    rest = text.strip()
    while rest:
        rest = rest.removeprefix(begin).strip()
        try:
            found, end = decoder.raw_decode(rest)
            json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            return []
        for item in found if isinstance(found, list) else [found]:
            if not isinstance(item, dict) or item.get("name") not in names:
                return []
            arguments = item.get(form.arguments, item.get("arguments", {}))
            calls.append(ToolCall(item["name"], json.dumps(arguments, ensure_ascii=False)))
        rest = rest[end:].strip().removeprefix(form.end.strip()).lstrip("; \n")
    return calls
