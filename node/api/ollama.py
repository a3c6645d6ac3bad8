"""Ollama's endpoints for programs that know only those: what they take, what they give, and where."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..client.generation.sampling import Sampling
from ..version import __version__
from .engine.core import Core
from .engine.generation import (
    ChatRequest,
    ChosenToken,
    CompletionRequest,
    Finished,
    Grammar,
    ServedModel,
    TextRequest,
    provenance,
)
from .engine.preparing import PreparedChat, prepare_chat, prepare_completion
from .engine.tools import ToolCall, tool_form
from .errors import ApiError, error_object
from .fields import Fields
from .http.answers import AnswersResponse
from .http.bodies import read_asked
from .one_answer import Chunk, SingleAnswerWriter
from .parts import (
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


PREFIX: Final = "/api/"


def timestamp() -> str:
    """Now, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class LineWriter(SingleAnswerWriter):
    """
    Args:
        of: the text of a token.
        is_chat: the answer is a message, and not a text by itself.
    """

    media_type = "application/x-ndjson"

    def __init__(self, request: TextRequest, chat: PreparedChat, of: Callable[[int], str], *, is_chat: bool) -> None:
        super().__init__(request, chat, f"ollama-{secrets.token_hex(12)}")
        self.model = request.model
        self._request = request
        self._of = of
        self._is_chat = is_chat
        self._begun = time.perf_counter()
        self._first: float | None = None
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []

    def encoded(self, chunk: Chunk | None) -> bytes:
        return b"" if chunk is None else json.dumps(chunk, ensure_ascii=False).encode() + b"\n"

    def add(self, text: str, tokens: Sequence[ChosenToken]) -> list[Chunk]:
        if tokens:
            self._first = self._first or time.perf_counter()
        logprobs = self._likelihoods(tokens) if self._request.logprobs else []
        return [self._line(text, (), logprobs)] if text or logprobs else []

    def finish(self, end: Finished, calls: Sequence[ToolCall]) -> list[Chunk]:
        chunks = [self._line("", calls, [])] if calls else []
        now = time.perf_counter()
        first = self._first or now
        last = {
            "done": True,
            "done_reason": end.reason,
            "total_duration": _nanoseconds(now - self._begun),
            "load_duration": 0,
            "prompt_eval_count": end.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - self._begun),
            "eval_count": end.tokens,
            "eval_duration": _nanoseconds(now - first),
            "x_petalnode": {"id": self.name, **provenance([end])},
        }
        self.complete = {**self._line(self._text, calls, self._logprobs, kept=False), **last}
        return [*chunks, {**self._line("", (), [], kept=False), **last}]

    def failed(self, error: ApiError) -> Chunk:
        return error_object(error, PREFIX)

    def _line(
        self, text: str, calls: Sequence[ToolCall], logprobs: list[dict[str, Any]], *, kept: bool = True
    ) -> Chunk:
        if kept and not self.streams:
            self._text += text
            self._logprobs += logprobs
        line: Chunk = {"model": self.model, "created_at": timestamp(), "done": False}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                message["tool_calls"] = [_call(call) for call in calls]
            line["message"] = message
        else:
            line["response"] = text
        if logprobs:
            line["logprobs"] = logprobs
        return line

    def _likelihoods(self, tokens: Sequence[ChosenToken]) -> list[dict[str, Any]]:
        return [
            {
                **self._likelihood(chosen.token, chosen.logprob),
                "top_logprobs": [self._likelihood(*likely) for likely in chosen.top],
            }
            for chosen in tokens
        ]

    def _likelihood(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._of(token), "logprob": max(logprob or 0.0, -9999.0)}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def ollama_routes(core: Core) -> list[BaseRoute]:
    """The routes below /api."""
    endpoints = _OllamaEndpoints(core)
    return [
        Route("/api/version", endpoints.version, methods=["GET"]),
        Route("/api/tags", endpoints.tags, methods=["GET"]),
        Route("/api/show", endpoints.show, methods=["POST"]),
        Route("/api/chat", endpoints.chat, methods=["POST"]),
        Route("/api/generate", endpoints.generate, methods=["POST"]),
    ]


class _OllamaEndpoints:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._since = timestamp()

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def tags(self, request: Request) -> Response:
        return JSONResponse({"models": [self._listed(model) for model in self._core.models.values()]})

    async def show(self, request: Request) -> Response:
        core = self._core
        model = core.model(model_name(await self._fields(request)))
        config = core.client.model.folder.config
        family = self._family
        capabilities = ["completion", *(["tools"] if tool_form(core.text.template) is not None else [])]
        return JSONResponse(
            {
                "template": core.text.template,
                "details": self._details(),
                "model_info": {
                    "general.architecture": family,
                    f"{family}.block_count": core.client.model.num_blocks,
                    f"{family}.context_length": core.context(model),
                    f"{family}.embedding_length": config.get("hidden_size"),
                },
                "capabilities": capabilities,
                "modified_at": self._since,
            }
        )

    async def chat(self, request: Request) -> Response:
        fields, asked = await read_asked(request, self._core, lambda fields: (fields, parse_chat(fields)))
        if asked is None:
            return self._loaded(fields, {"message": {"role": "assistant", "content": ""}})
        prepared = await prepare_chat(self._core, request.state.owner, asked)
        return self._answers(asked, prepared, is_chat=True)

    async def generate(self, request: Request) -> Response:
        fields, asked = await read_asked(request, self._core, lambda fields: (fields, parse_generate(fields)))
        if asked is None:
            return self._loaded(fields, {"response": ""})
        owner = request.state.owner
        if isinstance(asked, ChatRequest):
            prepared = await prepare_chat(self._core, owner, asked)
        else:
            prepared = PreparedChat(await prepare_completion(self._core, owner, asked))
        return self._answers(asked, prepared, is_chat=False)

    def _answers(self, asked: Any, prepared: PreparedChat, *, is_chat: bool) -> Response:
        writer = LineWriter(asked.text, prepared, self._core.text.token_text, is_chat=is_chat)
        return AnswersResponse(self._core, prepared.generation, writer)

    def _loaded(self, fields: Fields, empty: dict[str, Any]) -> Response:
        """To a request without a prompt, by which programs have a model loaded."""
        model = self._core.model(model_name(fields))
        line = {"model": model.name, "created_at": timestamp(), "done": True, "done_reason": "load", **empty}
        return JSONResponse(line)

    async def _fields(self, request: Request) -> Fields:
        return await read_asked(request, self._core, lambda fields: fields)

    @property
    def _family(self) -> str:
        return str(self._core.client.model.folder.config.get("model_type", "unknown"))

    def _details(self) -> dict[str, Any]:
        family = self._family
        return {"parent_model": "", "format": "safetensors", "family": family, "families": [family]}

    def _listed(self, model: ServedModel) -> dict[str, Any]:
        return {
            "name": model.name,
            "model": model.name,
            "modified_at": self._since,
            "digest": self._core.client.model.version.hex(),
            "size": 0,
            "details": self._details(),
        }
