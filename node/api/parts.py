"""Parts of requests that several interfaces have: forms, texts in parts, stop strings, functions and calls of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..blocks.images.pictures import Picture
from ..errors import BadInput
from .engine.generation import Grammar, SessionOptions
from .fields import Fields, parse_text


@dataclass(frozen=True)
class RequestLimits:
    """What one request may have."""

    max_stops: int = 16
    max_stop_characters: int = 256
    max_messages: int = 4096
    max_grammar_characters: int = 100_000
    max_tools: int = 128
    max_metadata: int = 16
    max_trusted: int = 64
    max_chains: int = 4
    largest: int = 1 << 31


REQUEST_LIMITS: Final = RequestLimits()
OPTIONS: Final = ("trusted_servers", "trusted_blocks", "compare_chains", "adapter", "draft")
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
        frozenset(given.texts("trusted_servers", REQUEST_LIMITS.max_trusted)),
        given.integer("trusted_blocks", 1, REQUEST_LIMITS.largest),
        given.integer("compare_chains", 1, REQUEST_LIMITS.max_chains) or 1,
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
    if len(grammar.text) > REQUEST_LIMITS.max_grammar_characters:
        raise fields.wrong(name, f"it has more than {REQUEST_LIMITS.max_grammar_characters} characters")
    return grammar


def content_text(message: Fields, name: str, kinds: Collection[str]) -> str | None:
    """The text of a field that is one, or a list of parts of these types or refusals. Raises ApiError."""
    content = message.get(name)
    if content is None or isinstance(content, str):
        return content
    texts = []
    for part in message.objects(name, REQUEST_LIMITS.max_messages):
        kind = part.text("type")
        if kind not in (*kinds, "refusal"):
            raise part.wrong("type", "there is only text here", "unsupported_content")
        texts.append(part.text("refusal" if kind == "refusal" else "text"))
    return "".join(texts)


def content_with_pictures(message: Fields, name: str) -> str | list[dict[str, Any]] | None:
    """The same of a message that may have pictures, as parts where it has some. Raises ApiError."""
    if isinstance(message.get(name), str | None):
        return content_text(message, name, ())
    return parts_of(message.objects(name, REQUEST_LIMITS.max_messages))


def parts_of(given: Sequence[Fields]) -> str | list[dict[str, Any]]:
    """Texts and pictures; a text where there are no pictures. Raises ApiError."""
    parts: list[dict[str, Any]] = []
    for part in given:
        picture = _picture(part)
        if picture is not None:
            parts.append({"type": "image", "image": picture})
        elif part.text("type") == "text":
            parts.append({"type": "text", "text": part.text("text")})
        else:
            raise part.wrong("type", "there is only text here, and pictures", "unsupported_content")
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _picture(part: Fields) -> Picture | None:
    """The URL of a part by OpenAI (`image_url`) or Anthropic (`image`); None of another one."""
    kind = part.text("type")
    if kind == "image_url":
        return picture_of(part.needed("image_url"), "url", Picture.of_url)
    if kind != "image":
        return None
    source = part.needed("source")
    if source.one_of("type", ("base64", "url"), "") == "url":
        return picture_of(source, "url", Picture.of_url)
    return picture_of(source, "data", Picture.of_base64)


def picture_of(fields: Fields, name: str, read: Callable[[str], Picture]) -> Picture:
    """Raises ApiError: it is not written as one, or too large. It is looked at in a thread, later."""
    try:
        return read(fields.text(name))
    except BadInput as error:
        raise fields.wrong(name, str(error), "unsupported_content") from None


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
    stop = fields.texts(name, REQUEST_LIMITS.max_stops)
    if any(not 0 < len(text) <= REQUEST_LIMITS.max_stop_characters for text in stop):
        raise fields.wrong(name, f"each has to have 1 to {REQUEST_LIMITS.max_stop_characters} characters")
    return stop


def metadata(fields: Fields) -> dict[str, str]:
    """What a client notes with what it asks for. Raises ApiError."""
    given = fields.object("metadata")
    if given is None:
        return {}
    if len(given.data) > REQUEST_LIMITS.max_metadata or any(len(name) > 64 for name in given.data):
        raise fields.wrong("metadata", f"{REQUEST_LIMITS.max_metadata} entries with names of 64 characters at most")
    found = {name: given.text(name) for name in given.data}
    if any(len(value) > 512 for value in found.values()):
        raise fields.wrong("metadata", "values have 512 characters at most")
    return found
