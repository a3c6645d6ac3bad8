"""What /v1/messages takes, read and checked. Pure: no model, no network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from ...client.generation.sampling import Sampling
from ..engine.requests import ChatRequest, Grammar, TextRequest
from ..fields import Fields
from ..parts import (
    REQUEST_LIMITS,
    bounded,
    function_tool,
    known_tool,
    positive,
    schema_grammar,
    session_options,
    stop_strings,
    template_call,
)

Message = dict[str, Any]

_THOUGHTS: Final = ("thinking", "redacted_thinking")


def parse_messages(fields: Fields, *, counted: bool = False) -> ChatRequest:
    """
    Args:
        counted: only the tokens of the prompt are asked for, and no limit of the answer.

    Raises:
        ApiError: a field is missing, of a wrong type, out of range, or asks for what is not done here.
    """
    fields.refuse(container="there are no containers here", mcp_servers="there are no tools here but the client's")
    thinking = fields.object("thinking")
    if thinking is not None and thinking.text("type") != "disabled":
        raise thinking.wrong("type", "the model cannot be told to think", "unsupported_parameter")
    limit = fields.integer("max_tokens", 1, REQUEST_LIMITS.largest)
    if limit is None and not counted:
        raise fields.wrong("max_tokens", "it is missing", "missing_field")
    text = TextRequest(
        model=fields.text("model", ""),
        sampling=Sampling(
            temperature=fields.number("temperature", 1.0, 0, 99),
            top_p=positive(fields, "top_p"),
            top_k=fields.integer("top_k", 0, REQUEST_LIMITS.largest) or 0,
        ),
        max_tokens=limit,
        stop=stop_strings(fields, "stop_sequences"),
        stream=fields.flag("stream"),
        grammar=_grammar(fields),
        options=session_options(fields),
    )
    messages = tuple(_messages(fields))
    if messages[-1]["role"] == "assistant":
        raise fields.wrong("messages", "the last one is the model's own: answers are not gone on with here")
    tools = tuple(_tool(tool) for tool in fields.objects("tools", REQUEST_LIMITS.max_tools))
    tool, named, parallel = _tool_choice(fields, tools)
    return ChatRequest(text, messages, tools, tool, named, parallel)


def _grammar(fields: Fields) -> Grammar | None:
    config = fields.object("output_config")
    form = config.object("format") if config is not None else None
    if form is None:
        return None
    form.one_of("type", ("json_schema",), "")
    return bounded(form, schema_grammar(form.needed("schema")), "schema")


def _messages(fields: Fields) -> Iterable[Message]:
    if fields.get("system") is not None:
        system = "\n\n".join(_texts(_blocks(fields, "system")))
        if system:
            yield {"role": "system", "content": system}
    given = fields.objects("messages", REQUEST_LIMITS.max_messages)
    if not given:
        raise fields.wrong("messages", "at least one message is needed")
    for message in given:
        role = message.one_of("role", ("user", "assistant"), "")
        blocks = _blocks(message, "content")
        if role == "assistant":
            yield _assistant(blocks)
        else:
            yield from _user(blocks)


def _blocks(fields: Fields, name: str) -> list[Fields]:
    value = fields.get(name)
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, fields.path(f"{name}."))]
    if value is None:
        raise fields.wrong(name, "it is missing", "missing_field")
    return fields.objects(name, REQUEST_LIMITS.max_messages)


def _texts(blocks: Sequence[Fields]) -> Iterable[str]:
    for block in blocks:
        if block.text("type") != "text":
            raise block.wrong("type", "there is only text here", "unsupported_content")
        yield block.text("text")


def _assistant(blocks: Sequence[Fields]) -> Message:
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    text = "".join(_texts([block for block in blocks if block.get("type") not in ("tool_use", *_THOUGHTS)]))
    return {"role": "assistant", "content": text or (None if calls else ""), **({"tool_calls": calls} if calls else {})}


def _call(block: Fields) -> dict[str, Any]:
    given = block.object("input")
    return template_call(block.text("name"), dict(given.data) if given is not None else {}, block.text("id"))


def _user(blocks: Sequence[Fields]) -> Iterable[Message]:
    """Results of tools are messages of their own, and stand before what the user says."""
    others = [block for block in blocks if block.get("type") != "tool_result"]
    for block in blocks:
        if block.get("type") == "tool_result":
            content = "" if block.get("content") is None else "".join(_texts(_blocks(block, "content")))
            yield {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": content}
    if others or not blocks:
        yield {"role": "user", "content": "".join(_texts(others))}


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.text("type", "custom") != "custom":
        raise tool.wrong("type", "there are no tools here but the client's", "unsupported_parameter")
    return function_tool(Fields({**tool.data, "parameters": tool.needed("input_schema").data}, tool.path("")))


def _tool_choice(fields: Fields, tools: tuple[dict[str, Any], ...]) -> tuple[str, bool, bool]:
    """The choice as `ChatRequest` has it, whether it is a name, and whether several calls may follow each other."""
    choice = fields.object("tool_choice")
    if choice is None:
        return ("auto" if tools else "none"), False, True
    parallel = not choice.flag("disable_parallel_tool_use")
    kind = choice.one_of("type", ("auto", "any", "tool", "none"), "")
    if kind == "tool":
        return known_tool(choice, tools, choice.text("name")), True, parallel
    if kind == "any" and not tools:
        raise choice.wrong("type", "it needs tools")
    return {"any": "required"}.get(kind, kind if tools else "none"), False, parallel


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; those that are none are in one as `arguments`."""
    found = json.loads(text)
    return found if isinstance(found, dict) else {"arguments": found}
