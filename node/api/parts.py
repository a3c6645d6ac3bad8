"""Parts of requests that several interfaces have: forms, texts in parts, stop strings, functions and calls of them."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final

from .engine.requests import Grammar, SessionOptions
from .fields import Fields, parse_text

MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
MAX_MESSAGES: Final = 4096
MAX_GRAMMAR_CHARACTERS: Final = 100_000
MAX_TOOLS: Final = 128
MAX_METADATA: Final = 16
MAX_TRUSTED: Final = 64
MAX_CHAINS: Final = 4
OPTIONS: Final = ("trusted_servers", "trusted_blocks", "compare_chains", "adapter", "draft")
LARGEST: Final = 1 << 31
JSON_OBJECT: Final = Grammar("json_object", json.dumps({"type": "object"}))


def session_options(fields: Fields) -> SessionOptions:
    """What `x_petalnode` of a request asks of the servers.

    Raises:
        ApiError: a field that is not known too: privacy must not hang on a word that was spelt wrong.
    """
    given = fields.object("x_petalnode")
    if given is None:
        return SessionOptions()
    for name in given.data:
        if name not in OPTIONS:
            raise given.wrong(name[:100], f"known are {', '.join(OPTIONS)}", "unsupported_parameter")
    return SessionOptions(
        frozenset(given.texts("trusted_servers", MAX_TRUSTED)),
        given.integer("trusted_blocks", 1, LARGEST),
        given.integer("compare_chains", 1, MAX_CHAINS) or 1,
        given.text("adapter", ""),
        _drafts(given),
    )


def _drafts(given: Fields) -> bool:
    draft = given.text("draft", "auto")
    if draft not in ("auto", "none"):
        raise given.wrong("draft", "give auto or none")
    return draft == "auto"


def schema_grammar(schema: Fields) -> Grammar:
    """Of a JSON schema."""
    return Grammar("json_schema", json.dumps(schema.data))


def bounded(fields: Fields, grammar: Grammar, name: str = "response_format") -> Grammar:
    """`grammar`, which the field `name` has given. Raises ApiError if it is too long."""
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise fields.wrong(name, f"it has more than {MAX_GRAMMAR_CHARACTERS} characters")
    return grammar


def content_text(message: Fields, name: str, kinds: Collection[str]) -> str | None:
    """The text of a field that is one, or a list of parts of these types or refusals. Raises ApiError."""
    content = message.get(name)
    if content is None or isinstance(content, str):
        return content
    texts = []
    for part in message.objects(name, MAX_MESSAGES):
        kind = part.text("type")
        if kind not in (*kinds, "refusal"):
            raise part.wrong("type", "there is only text here", "unsupported_content")
        texts.append(part.text("refusal" if kind == "refusal" else "text"))
    return "".join(texts)


def function_call(function: Fields, name: str) -> dict[str, Any]:
    """A call with the id `name`, as chat templates take it. Raises ApiError."""
    return template_call(function.text("name"), parse_text(function, "arguments", "{}"), name)


def template_call(name: str, arguments: Any, identity: str | None) -> dict[str, Any]:
    """A call of the function `name`, as chat templates take it; None for a call without an id."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if identity is None else {"id": identity, **call}


def function_tool(function: Fields) -> dict[str, Any]:
    """A tool as chat templates take it. Raises ApiError."""
    name = function.text("name")
    if not 0 < len(name) <= 64 or not all(letter.isalnum() or letter in "_-." for letter in name):
        raise function.wrong("name", "1 to 64 letters, digits, dots, dashes and underscores are expected")
    parameters = function.object("parameters")
    parsed: dict[str, Any] = {
        "name": name,
        "description": function.text("description", ""),
        "parameters": dict(parameters.data) if parameters is not None else {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": parsed}


def known_tool(fields: Fields, tools: tuple[dict[str, Any], ...], name: str) -> str:
    """`name`, which has to be that of a tool. Raises ApiError."""
    if name not in {tool["function"]["name"] for tool in tools}:
        raise fields.wrong("tool_choice", f"there is no tool {name[:100]!r}")
    return name


def stop_strings(fields: Fields, name: str) -> tuple[str, ...]:
    """A text, or some. Raises ApiError."""
    stop = fields.texts(name, MAX_STOPS)
    if any(not 0 < len(text) <= MAX_STOP_CHARACTERS for text in stop):
        raise fields.wrong(name, f"each has to have 1 to {MAX_STOP_CHARACTERS} characters")
    return stop


def positive(fields: Fields, name: str, default: float = 1.0) -> float:
    """A number above 0, at most 1. Raises ApiError."""
    value = fields.number(name, default, 0, 1)
    if value == 0:
        raise fields.wrong(name, "0 leaves no token: for greedy decoding set temperature to 0")
    return value


def metadata(fields: Fields) -> dict[str, str]:
    """What a client notes with what it asks for. Raises ApiError."""
    given = fields.object("metadata")
    if given is None:
        return {}
    if len(given.data) > MAX_METADATA or any(len(name) > 64 for name in given.data):
        raise fields.wrong("metadata", f"{MAX_METADATA} entries with names of 64 characters at most")
    found = {name: given.text(name) for name in given.data}
    if any(len(value) > 512 for value in found.values()):
        raise fields.wrong("metadata", "values have 512 characters at most")
    return found
