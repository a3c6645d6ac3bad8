"""What Ollama's /api/chat and /api/generate take, read and checked. Pure: no model, no network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from ...client.generation.sampling import Sampling
from ..engine.requests import ChatRequest, CompletionRequest, Grammar, TextRequest
from ..fields import Fields
from ..parts import (
    JSON_OBJECT,
    REQUEST_LIMITS,
    bounded,
    function_tool,
    positive,
    schema_grammar,
    session_options,
    stop_strings,
    template_call,
)


@dataclass(frozen=True)
class OllamaDefaults:
    """The sampling of Ollama where a request does not say."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9


OLLAMA: Final = OllamaDefaults()
_LATEST: Final = ":latest"

Message = dict[str, Any]


def model_name(fields: Fields) -> str:
    """The model that is meant; to Ollama `NAME:latest` is the same as NAME. Raises ApiError."""
    name = fields.text("model", "") or fields.text("name", "")
    if not name:
        raise fields.wrong("model", "it is missing", "missing_field")
    return name.removesuffix(_LATEST)


def parse_chat(fields: Fields) -> ChatRequest | None:
    """None if nothing is asked, which to Ollama means that the model shall be loaded.

    Raises:
        ApiError: a field is missing, of a wrong type, out of range, or asks for what is not done here.
    """
    text = _text(fields)
    messages = tuple(_message(message) for message in fields.objects("messages", REQUEST_LIMITS.max_messages))
    if not messages:
        return None
    tools = tuple(function_tool(tool.needed("function")) for tool in fields.objects("tools", REQUEST_LIMITS.max_tools))
    return ChatRequest(text, messages, tools, "auto" if tools else "none")


def parse_generate(fields: Fields) -> ChatRequest | CompletionRequest | None:
    """The prompt as a chat by the model's template, or with `raw` as it is; None if nothing is asked.

    Raises:
        ApiError: as `parse_chat`.
    """
    fields.refuse(
        suffix="text cannot be put between two texts here",
        template="the chat template is that of the model",
        context="give the conversation to /api/chat instead",
        images="there is only text here",
    )
    text, prompt = _text(fields), fields.text("prompt", "")
    if not prompt:
        return None
    if fields.flag("raw"):
        return CompletionRequest(text, (prompt,))
    system = fields.text("system", "")
    before = [{"role": "system", "content": system}] if system else []
    return ChatRequest(text, (*before, {"role": "user", "content": prompt}), (), "none")


def _text(fields: Fields) -> TextRequest:
    fields.refuse(think="the model cannot be told to think")
    options = fields.object("options") or Fields({}, "options.")
    limit = options.integer("num_predict", -REQUEST_LIMITS.largest, REQUEST_LIMITS.largest)
    logprobs = fields.flag("logprobs")
    return TextRequest(
        model=model_name(fields),
        sampling=_sampling(options),
        max_tokens=limit if limit is not None and limit > 0 else None,
        stop=stop_strings(options, "stop"),
        logprobs=logprobs,
        top_logprobs=(fields.integer("top_logprobs", 0, 20) or 0) if logprobs else 0,
        stream=fields.get("stream") is None or fields.flag("stream"),
        grammar=_grammar(fields),
        options=session_options(fields),
    )


def _sampling(options: Fields) -> Sampling:
    top_k = options.integer("top_k", 0, REQUEST_LIMITS.largest)
    seed = options.integer("seed", -REQUEST_LIMITS.largest, REQUEST_LIMITS.largest)
    return Sampling(
        temperature=options.number("temperature", OLLAMA.temperature, 0, 99),
        top_p=positive(options, "top_p", OLLAMA.top_p),
        top_k=OLLAMA.top_k if top_k is None else top_k,
        min_p=options.number("min_p", 0.0, 0, 1),
        seed=seed or None,
        repetition_penalty=options.number("repeat_penalty", 1.0, 0.01, 100),
        presence_penalty=options.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=options.number("frequency_penalty", 0.0, -2, 2),
    )


def _grammar(fields: Fields) -> Grammar | None:
    given = fields.get("format")
    if given in (None, ""):
        return None
    if isinstance(given, str):
        fields.one_of("format", ("json",), "json")
        return JSON_OBJECT
    return bounded(fields, schema_grammar(fields.object("format") or Fields({})), "format")


def _message(message: Fields) -> Message:
    message.refuse(images="there is only text here")
    role = message.one_of("role", ("system", "user", "assistant", "tool"), "")
    parsed: Message = {"role": role, "content": message.text("content", "")}
    if role == "assistant" and (calls := list(_calls(message))):
        parsed["tool_calls"] = calls
    if role == "tool" and message.get("tool_name") is not None:
        parsed["name"] = message.text("tool_name")
    return parsed


def _calls(message: Fields) -> Iterable[dict[str, Any]]:
    for call in message.objects("tool_calls", REQUEST_LIMITS.max_tools):
        function = call.needed("function")
        arguments = function.object("arguments")
        yield template_call(function.text("name"), dict(arguments.data) if arguments is not None else {}, None)
