"""What OpenAI's endpoints for text take, read and checked. Pure: no model, no network."""

from __future__ import annotations

import json
from typing import Any, Final

from ...client.generation.sampling import Sampling
from ..engine.generation import ChatRequest, CompletionRequest, Grammar, TextRequest
from ..fields import Fields
from ..parts import (
    JSON_OBJECT,
    REQUEST_LIMITS,
    bounded,
    content_text,
    content_with_pictures,
    function_call,
    function_tool,
    known_tool,
    schema_grammar,
    session_options,
    stop_strings,
)

MAX_CHOICES: Final = 16
MAX_TOP_LOGPROBS: Final = 20


def parse_chat(fields: Fields) -> ChatRequest:
    """
    Raises:
        ApiError: a field is missing, of a wrong type, out of range, or asks for what is not done here.
    """
    fields.refuse(
        functions="this is the old form: use tools",
        function_call="this is the old form: use tool_choice",
        audio="there is only text here",
        prediction="predicted outputs are not supported",
        web_search_options="there is no search here",
    )
    if fields.get("modalities") not in (None, ["text"]):
        raise fields.wrong("modalities", "there is only text here", "unsupported_parameter")
    messages = tuple(_message(message) for message in fields.objects("messages", REQUEST_LIMITS.max_messages))
    if not messages:
        raise fields.wrong("messages", "at least one message is needed")
    tools = tuple(_tool(tool) for tool in fields.objects("tools", REQUEST_LIMITS.max_tools))
    return chat_request(fields, messages, tools)


def chat_request(
    fields: Fields, messages: tuple[dict[str, Any], ...], tools: tuple[dict[str, Any], ...]
) -> ChatRequest:
    """A chat whose messages and tools are read already. Raises ApiError."""
    text, (tool, named) = chat_text(fields), _tool_choice(fields, tools)
    return ChatRequest(text, messages, tools, tool, named, fields.get("parallel_tool_calls") is not False)


def chat_text(fields: Fields) -> TextRequest:
    """What a chat has in common with other texts. Raises ApiError."""
    text = _text_request(
        fields,
        max_tokens=_limit(fields, "max_completion_tokens", _limit(fields, "max_tokens", None)),
        logprobs=fields.flag("logprobs"),
        top_logprobs=fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0,
    )
    if text.top_logprobs and not text.logprobs:
        raise fields.wrong("top_logprobs", "it needs logprobs: true")
    return text


def parse_completion(fields: Fields) -> CompletionRequest:
    """
    Raises:
        ApiError: as `parse_chat`.
    """
    fields.refuse(suffix="text cannot be put between two texts here")
    top = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    text = _text_request(
        fields, max_tokens=_limit(fields, "max_tokens", 16, least=0), logprobs=top is not None, top_logprobs=top or 0
    )
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    if best_of not in (None, text.choices):
        raise fields.wrong(
            "best_of", "answers are not ranked here: leave it out, or give as many as n", "unsupported_parameter"
        )
    prompts = _prompts(fields)
    if len(prompts) * text.choices > MAX_CHOICES:
        raise fields.wrong("prompt", f"with n {text.choices} these are too many: {MAX_CHOICES} answers at most")
    echo = fields.flag("echo")
    if text.max_tokens == 0 and not echo:
        raise fields.wrong("max_tokens", "no tokens are asked for: 0 is for echo")
    if echo and text.stream:
        raise fields.wrong("echo", "it does not go with stream", "unsupported_parameter")
    return CompletionRequest(text, prompts, echo)


def _limit(fields: Fields, name: str, default: int | None, least: int = 1) -> int | None:
    found = fields.integer(name, least, REQUEST_LIMITS.largest)
    return default if found is None else found


def _text_request(fields: Fields, *, max_tokens: int | None, logprobs: bool, top_logprobs: int) -> TextRequest:
    options = fields.object("stream_options")
    stream = fields.flag("stream")
    if options is not None and not stream:
        raise fields.wrong("stream_options", "it needs stream: true")
    return TextRequest(
        model=fields.text("model", ""),
        sampling=sampling(fields),
        choices=fields.integer("n", 1, MAX_CHOICES) or 1,
        max_tokens=max_tokens,
        stop=stop_strings(fields, "stop"),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        stream=stream,
        include_usage=options is not None and options.flag("include_usage"),
        grammar=_grammar(fields),
        options=session_options(fields),
        include_progress=options is not None and options.flag("include_progress"),
    )


def sampling(fields: Fields) -> Sampling:
    """How tokens are chosen, by the fields that all of OpenAI's endpoints for text have. Raises ApiError."""
    return Sampling(
        temperature=fields.number("temperature", 1.0, 0, 99),
        top_p=fields.number("top_p", 1.0, 0, 1),
        seed=fields.integer("seed", -(1 << 63), (1 << 63) - 1),
        top_k=max(0, fields.integer("top_k", -1, REQUEST_LIMITS.largest) or 0),
        min_p=fields.number("min_p", 0.0, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        logit_bias=_biases(fields),
    )


def _biases(fields: Fields) -> dict[int, float]:
    given = fields.object("logit_bias")
    if given is None:
        return {}
    if len(given.data) > 1024:
        raise fields.wrong("logit_bias", "1024 tokens at most")
    if not all(name.isdecimal() and len(name) < 10 for name in given.data):
        raise fields.wrong("logit_bias", "its keys have to be token ids")
    return {int(name): given.number(name, 0.0, -100, 100) for name in given.data}


def _grammar(fields: Fields) -> Grammar | None:
    found: list[Grammar] = []
    wanted = fields.object("response_format")
    if wanted is not None:
        kind = wanted.one_of("type", ("text", "json_object", "json_schema"), "text")
        if kind == "json_object":
            found.append(JSON_OBJECT)
        elif kind == "json_schema":
            given = wanted.object("json_schema")
            schema = given.object("schema") if given is not None else None
            if schema is None:
                raise wanted.wrong("json_schema", "it is missing, or has no schema")
            found.append(schema_grammar(schema))
    if fields.get("guided_json") is not None:
        schema = fields.object("guided_json")
        found.append(schema_grammar(schema or Fields({})))
    if fields.get("guided_regex") is not None:
        found.append(Grammar("regex", fields.text("guided_regex")))
    if fields.get("guided_choice") is not None:
        found.append(_choice(fields))
    if len(found) > 1:
        raise fields.wrong("response_format", "an answer can be bound to one form only")
    return bounded(fields, found[0]) if found else None


def _choice(fields: Fields) -> Grammar:
    choices = fields.texts("guided_choice", 1024)
    if not choices or not all(choices):
        raise fields.wrong("guided_choice", "it needs texts that are not empty")
    return Grammar("choice", json.dumps(choices))


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    given = fields.get("prompt")
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list) and given:
        if _are_tokens(given):
            return (tuple(given),)
        if len(given) > MAX_CHOICES:
            raise fields.wrong("prompt", f"{len(given)} prompts are too many: {MAX_CHOICES} at most")
        if all(isinstance(prompt, str) for prompt in given):
            return tuple(given)
        if all(isinstance(prompt, list) and prompt and _are_tokens(prompt) for prompt in given):
            return tuple(tuple(prompt) for prompt in given)
    raise fields.wrong("prompt", "a text, token ids, or a list of either is expected", "missing_field")


def _are_tokens(values: list[Any]) -> bool:
    return all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < REQUEST_LIMITS.largest
        for value in values
    )


def _message(message: Fields) -> dict[str, Any]:
    role = message.one_of("role", ("system", "developer", "user", "assistant", "tool"), "")
    parsed: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": content_with_pictures(message, "content")
        if role == "user"
        else content_text(message, "content", ("text",)),
    }
    if role == "assistant":
        calls = [_call(call) for call in message.objects("tool_calls", 128)]
        if calls:
            parsed["tool_calls"] = calls
    elif parsed["content"] is None:
        raise message.wrong("content", "it is missing", "missing_field")
    if role == "tool":
        parsed["tool_call_id"] = message.text("tool_call_id", "")
    if message.get("name") is not None:
        parsed["name"] = message.text("name")
    return parsed


def _call(call: Fields) -> dict[str, Any]:
    return function_call(call.needed("function"), call.text("id", ""))


def _tool(tool: Fields) -> dict[str, Any]:
    tool.one_of("type", ("function",), "function")
    return function_tool(tool.needed("function"))


def _tool_choice(fields: Fields, tools: tuple[dict[str, Any], ...]) -> tuple[str, bool]:
    if isinstance(fields.get("tool_choice"), str | None):
        return tool_mode(fields, tools), False
    given = fields.object("tool_choice")
    function = given.object("function") if given is not None else None
    name = function.text("name") if function is not None else ""
    return known_tool(fields, tools, name), True


def tool_mode(fields: Fields, tools: tuple[dict[str, Any], ...]) -> str:
    """`tool_choice` where it is absent or a text. Raises ApiError."""
    mode = fields.one_of("tool_choice", ("auto", "none", "required"), "auto" if tools else "none")
    if mode == "required" and not tools:
        raise fields.wrong("tool_choice", "it needs tools")
    return mode if tools else "none"
