"""Ollama's endpoints for programs that know only those, translated into chats of OpenAI's and back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..blocks.images.pictures import PICTURES, Picture
from ..client.generation.picture_prompts import with_pictures
from ..version import __version__
from .engine.core import Core
from .engine.generation import ChatRequest, CompletionRequest, Finished, ServedModel, TextPiece, TextRequest, provenance
from .engine.preparing import PreparedChat, prepare_chat, prepare_completion
from .engine.tools import tool_form
from .errors import ApiError, error_object
from .fields import Fields
from .http.answers import AnswersResponse
from .http.bodies import read_asked, read_fields
from .openai.endpoints import embedded
from .openai.requests import chat_request, chat_text
from .openai.writers import ChatWriter, Head, TokenText
from .parts import REQUEST_LIMITS, function_tool, picture_of, template_call

_DEFAULTS: Final = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""The sampling of Ollama where a request does not say."""
_SAME: Final = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "stop")
_OPTIONS: Final = {**dict(zip(_SAME, _SAME, strict=True)), "repetition_penalty": "repeat_penalty"}
_AS_OPENAI: Final = {**{name: f"options.{own}" for name, own in _OPTIONS.items()}, "response_format": "format"}
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
    translated = _translated(fields)
    messages = tuple(_message(message) for message in fields.objects("messages", REQUEST_LIMITS.max_messages))
    tools = tuple(function_tool(tool.needed("function")) for tool in fields.objects("tools", REQUEST_LIMITS.max_tools))
    return chat_request(translated, messages, tools) if messages else None


def parse_generate(fields: Fields) -> ChatRequest | CompletionRequest | None:
    """The prompt as a chat by the model's template, or with `raw` as it is. None if nothing is asked.

    Raises:
        ApiError: as `parse_chat`.
    """
    fields.refuse(
        suffix="text cannot be put between two texts here",
        template="the chat template is that of the model",
        context="give the conversation to /api/chat instead",
    )
    text, prompt = chat_text(_translated(fields)), fields.text("prompt", "")
    if not prompt:
        return None
    if fields.flag("raw"):
        fields.refuse(images="a raw prompt has only text")
        return CompletionRequest(text, (prompt,))
    system = fields.text("system", "")
    before = [{"role": "system", "content": system}] if system else []
    return ChatRequest(text, (*before, {"role": "user", "content": _seen(fields, prompt)}), (), "none")


def _seen(fields: Fields, text: str) -> str | list[dict[str, Any]]:
    """A text, behind the pictures that its `images` has in base64. Raises ApiError."""
    given = fields.texts("images", PICTURES.count)
    one_by_one = [Fields({"images": image}, fields.path("")) for image in given]
    return with_pictures(text, [picture_of(image, "images", Picture.of_base64) for image in one_by_one])


def _translated(fields: Fields) -> Fields:
    """What is not the prompt, as OpenAI's chats have it."""
    fields.refuse(think="the model cannot be told to think")
    options, most = fields.object("options") or Fields({}, "options."), REQUEST_LIMITS.largest
    chosen = {name: options.get(own) for name, own in _OPTIONS.items()}
    limit, seed = options.integer("num_predict", -most, most), options.integer("seed", -(1 << 63), (1 << 63) - 1)
    return fields.translated(
        _AS_OPENAI,
        ("x_petalnode", *(("logprobs", "top_logprobs") if fields.flag("logprobs") else ())),
        **_DEFAULTS | {name: value for name, value in chosen.items() if value is not None},
        model=model_name(fields),
        seed=None if seed == -1 else seed,
        max_tokens=limit if limit is not None and limit > 0 else None,
        stream=True if fields.get("stream") is None else fields.get("stream"),
        response_format=_response_format(fields),
    )


def _response_format(fields: Fields) -> dict[str, Any] | None:
    if fields.get("format") in (None, ""):
        return None
    if isinstance(fields.get("format"), str):
        return {"type": f"{fields.one_of('format', ('json',), '')}_object"}
    return {"type": "json_schema", "json_schema": {"schema": fields.needed("format").data}}


def _message(message: Fields) -> Message:
    role = message.one_of("role", ("system", "user", "assistant", "tool"), "")
    parsed: Message = {"role": role, "content": _seen(message, message.text("content", ""))}
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
_MEDIA_TYPES: Final = ("application/json", "application/x-ndjson")
"""Of an answer in one piece, and of a stream."""


def timestamp() -> str:
    """Now, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class LineWriter(ChatWriter):
    """
    Args:
        of: the text of a token.
        is_chat: the answer is a message, and not a text by itself.
    """

    media_type = "application/x-ndjson"

    def __init__(self, request: TextRequest, chat: PreparedChat, of: TokenText, *, is_chat: bool) -> None:
        super().__init__(request, Head(request.model, "ollama", ""), of, chat)
        self._is_chat = is_chat
        self._begun = time.perf_counter()
        self._first: float | None = None
        self._measured: dict[str, Any] = {}

    def encoded(self, chunk: dict[str, Any] | None) -> bytes:
        return b"" if chunk is None else json.dumps(chunk, ensure_ascii=False).encode() + b"\n"

    def opening(self) -> list[dict[str, Any]]:
        return []

    def take(self, piece: TextPiece) -> list[dict[str, Any]]:
        if piece.tokens:
            self._first = self._first or time.perf_counter()
        said = [chunk["choices"][0] for chunk in super().take(piece)]
        return [self._line(one["delta"], one) for one in said if one["delta"]["content"] or one["logprobs"]]

    def close(self, end: Finished) -> list[dict[str, Any]]:
        said = [chunk["choices"][0] for chunk in super().close(end)]
        now = time.perf_counter()
        first = self._first or now
        self._measured = {
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
        lines = [self._line(one["delta"], one) for one in said]
        return [*lines[:-1], {**lines[-1], **self._measured}]

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error_object(error, PREFIX)

    def whole(self) -> dict[str, Any]:
        (choice,) = super().whole()["choices"]
        return {**self._line(choice["message"], choice), **self._measured}

    def _line(self, said: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self._head.model, "created_at": timestamp(), "done": False}
        text = said.get("content") or ""
        if self._is_chat:
            calls = [_call(call) for call in said.get("tool_calls", ())]
            line["message"] = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        else:
            line["response"] = text
        if choice["logprobs"] and choice["logprobs"]["content"]:
            line["logprobs"] = [
                {**_likelihood(token), "top_logprobs": [_likelihood(likely) for likely in token["top_logprobs"]]}
                for token in choice["logprobs"]["content"]
            ]
        return line


def _likelihood(token: dict[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"] or 0.0}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    called = call["function"]
    return {"function": {"name": called["name"], "arguments": json.loads(called["arguments"])}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def ollama_routes(core: Core) -> list[BaseRoute]:
    """The routes below /api."""
    endpoints = _OllamaEndpoints(core)
    return [
        Route("/api/version", endpoints.version, methods=["GET"]),
        Route("/api/tags", endpoints.tags, methods=["GET"]),
        Route("/api/ps", endpoints.running, methods=["GET"]),
        Route("/api/pull", endpoints.pull, methods=["POST"]),
        Route("/api/show", endpoints.show, methods=["POST"]),
        Route("/api/embed", endpoints.embed, methods=["POST"]),
        Route("/api/embeddings", endpoints.embeddings, methods=["POST"]),
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

    async def running(self, request: Request) -> Response:
        """All models are there as long as this process is: 9999 stands for no end, as in Ollama."""
        more = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
        return JSONResponse({"models": [self._listed(model) | more for model in self._core.models.values()]})

    async def pull(self, request: Request) -> Response:
        """What is served is there already; no other model is fetched because a request names it."""
        fields = await read_fields(request, self._core)
        self._core.model(model_name(fields))
        stream = fields.get("stream") is not False
        return Response('{"status":"success"}' + "\n" * stream, media_type=_MEDIA_TYPES[stream])

    async def show(self, request: Request) -> Response:
        core = self._core
        model = core.model(model_name(await read_fields(request, self._core)))
        details = self._details()
        family = details["family"]
        capabilities = ["completion", *(["tools"] if tool_form(core.text.template) is not None else [])]
        capabilities += ["vision"] if core.takes_pictures else []
        return JSONResponse(
            {
                "template": core.text.template,
                "details": details,
                "model_info": {
                    "general.architecture": family,
                    f"{family}.block_count": core.client.model.num_blocks,
                    f"{family}.context_length": core.context(model),
                    f"{family}.embedding_length": core.client.model.folder.config.get("hidden_size"),
                },
                "capabilities": capabilities,
                "modified_at": self._since,
            }
        )

    async def embeddings(self, request: Request) -> Response:
        """What `embed` has replaced, for one text."""
        fields = await read_fields(request, self._core)
        asked = fields.translated({"input": "prompt"}, ("x_petalnode",), input=fields.text("prompt"))
        model = self._core.model(model_name(fields))
        (vector,), _ = await embedded(self._core, request.state.owner, model, asked, "mean")
        return JSONResponse({"embedding": vector})

    async def embed(self, request: Request) -> Response:
        fields = await read_fields(request, self._core)
        fields.refuse(dimensions="a model's hidden states have one size only")
        begun, model = time.perf_counter(), self._core.model(model_name(fields))
        vectors, tokens = await embedded(self._core, request.state.owner, model, fields, "mean")
        took = {"total_duration": _nanoseconds(time.perf_counter() - begun), "load_duration": 0}
        return JSONResponse({"model": model.name, "embeddings": vectors, **took, "prompt_eval_count": tokens})

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

    def _details(self) -> dict[str, Any]:
        family = str(self._core.client.model.folder.config.get("model_type", "unknown"))
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
