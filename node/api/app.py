"""The routes of `petalnode api`."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from ..client.sampling import Sampling
from ..errors import PetalnodeError
from ..trust.receipt_file import to_json
from .admission import Admission, AdmissionMiddleware
from .core import Core
from .errors import ApiError, api_error
from .fields import Fields, parse_object
from .generation import Event, Failed, Finished, GenerationRequest, Piece, ServedModel
from .openai_format import DONE, Head, event, merged
from .requests import ChatRequest, CompletionRequest, TextRequest, parse_chat, parse_completion
from .tools import ToolForm, call_grammar, grammar_after_mark, tool_form
from .writers import ChatWriter, TextWriter, Writer

_GREEDY: Final = Sampling()
_LARGE: Final = 64 << 10
_MAX_INPUTS: Final = 64
_CHARACTERS_PER_TOKEN: Final = 100
_SSE: Final = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


def create_app(core: Core, admission: Admission, pages: Sequence[BaseRoute] = ()) -> AdmissionMiddleware:
    """The ASGI application.

    Args:
        pages: routes beside the API, such as `Mount("/", StaticFiles(...))` for a web page. They come after the API's,
            need no key, and are told nothing that does.
    """
    endpoints = _Endpoints(core)
    routes = [
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/models/{name:path}", endpoints.one_model, methods=["GET"]),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/petalnode/receipts/{name}", endpoints.receipts, methods=["GET"]),
        Route("/v1/embeddings", endpoints.embeddings, methods=["POST"]),
        *pages,
    ]
    handlers: Mapping[Any, Any] = {
        ApiError: _error_response,
        PetalnodeError: _error_response,
        HTTPException: _http_error,
        Exception: _error_response,
    }
    return AdmissionMiddleware(Starlette(routes=routes, exception_handlers=dict(handlers)), admission)


async def _error_response(request: Request, error: Exception) -> Response:
    told = api_error(error)
    return JSONResponse(told.fields(), told.status, told.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = f"there is no {request.url.path[:200]} here" if status == 404 else str(getattr(error, "detail", error))
    headers = getattr(error, "headers", None)
    return JSONResponse(ApiError(status, text, code="unknown_url").fields(), status, headers)


class _Endpoints:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._since = int(time.time())

    async def models(self, request: Request) -> Response:
        listed = [self._model(model) for model in self._core.models.values()]
        return JSONResponse({"object": "list", "data": listed})

    async def one_model(self, request: Request) -> Response:
        return JSONResponse(self._model(self._core.model(request.path_params["name"])))

    def _model(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._since,
            "owned_by": "petalnode",
            "max_model_len": self._core.context(model),
        }

    async def chat(self, request: Request) -> Response:
        asked: ChatRequest = parse_chat(await self._fields(request))
        core, text = self._core, asked.text
        model = core.model(text.model)
        form = tool_form(core.text.template) if asked.tools and asked.tool != "none" else None
        if asked.tools and asked.tool != "none" and form is None:
            raise ApiError(
                400,
                f"the chat template of {core.base.name} has no tools: use response_format, or a model that was "
                "trained to call tools",
                param="tools",
                code="unsupported_parameter",
            )
        if form is not None and text.grammar is not None:
            raise ApiError(400, "response_format does not go with tools", param="response_format")
        self._check_size(sum(len(message["content"] or "") for message in asked.messages), model)
        tools = asked.tools if form is not None else ()
        prompt = await trio.to_thread.run_sync(core.text.chat_prompt, asked.messages, tools)
        grammar = await self._grammar(text) if form is None else await self._call_grammar(form, asked)
        wanted = replace(
            self._generation(request, text, model, [tuple(prompt)] * text.choices, grammar),
            bound_after=form.mark if form is not None and asked.tool == "auto" else "",
            shows_special=form is not None,
        )
        names = [tool["function"]["name"] for tool in tools]
        head = Head(model.name, "chatcmpl")
        writer = ChatWriter(text, head, text.choices, core.text.token_text, form, names)
        return _Answers(core, wanted, text, writer, head.id)

    async def _call_grammar(self, form: ToolForm, asked: ChatRequest) -> str | None:
        """Of calls of tools; None if nothing but the whole answer tells that it is one, and none has to be."""
        special, grammars = self._core.text.special_token, self._core.grammars
        if asked.tool != "auto":
            only, many = (asked.tool, False) if asked.named else (None, asked.parallel)
            grammar = call_grammar(form, asked.tools, special, only=only, many=many)
        elif form.mark:
            grammar = grammar_after_mark(form, asked.tools, special, many=asked.parallel)
        else:
            return None
        return await trio.to_thread.run_sync(grammars.checked, grammar)

    async def completions(self, request: Request) -> Response:
        asked: CompletionRequest = parse_completion(await self._fields(request))
        core, text = self._core, asked.text
        model = core.model(text.model)
        prompts: list[tuple[int, ...]] = []
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                self._check_size(len(prompt), model)
                prompt = tuple(await trio.to_thread.run_sync(core.text.encode, prompt))
            prompts.extend([prompt] * text.choices)
        wanted = self._generation(
            request, text, model, prompts, await self._grammar(text), echo=asked.echo, continues=True
        )
        head = Head(model.name, "cmpl")
        return _Answers(core, wanted, text, TextWriter(text, head, len(prompts), core.text.token_text), head.id)

    async def embeddings(self, request: Request) -> Response:
        fields = await self._fields(request)
        fields.refuse(dimensions="a model's hidden states have one size only")
        core, model = self._core, self._core.model(fields.text("model", ""))
        form = fields.one_of("encoding_format", ("float", "base64"), "float")
        pooling = fields.one_of("pooling", ("mean", "last"), "mean")
        prompts = await self._inputs(fields, model)
        owner = request.state.owner
        await core.check(GenerationRequest(owner, model, tuple(prompts), _GREEDY))
        data = []
        for index, prompt in enumerate(prompts):
            states = await core.hidden_states(owner, model, prompt)
            vector = states.mean(0) if pooling == "mean" else states[-1]
            values = torch.nn.functional.normalize(vector, dim=0).tolist()
            packed = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
            data.append({"object": "embedding", "index": index, "embedding": packed if form == "base64" else values})
        tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": usage})

    async def receipts(self, request: Request) -> Response:
        name = request.path_params["name"]
        replies = self._core.receipts.find(request.state.owner, name)
        if replies is None:
            raise ApiError(404, f"there are no receipts of an answer {name[:200]!r} (any more)", code="not_found")
        return JSONResponse(await trio.to_thread.run_sync(to_json, name, replies))

    async def _inputs(self, fields: Fields, model: ServedModel) -> list[tuple[int, ...]]:
        given = fields.get("input")
        if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
            given = [given]
        if not isinstance(given, list) or not 0 < len(given) <= _MAX_INPUTS:
            raise fields.wrong("input", f"a text, token ids, or a list of up to {_MAX_INPUTS} of either is expected")
        prompts: list[tuple[int, ...]] = []
        for item in given:
            if isinstance(item, str):
                self._check_size(len(item), model)
                prompts.append(tuple(await trio.to_thread.run_sync(self._core.text.encode, item)))
            elif isinstance(item, list) and all(type(token) is int and token >= 0 for token in item):
                prompts.append(tuple(item))
            else:
                raise fields.wrong("input", "a text or token ids are expected")
        return prompts

    async def _fields(self, request: Request) -> Fields:
        body = await _body(request, self._core.limits.body_bytes)
        return await trio.to_thread.run_sync(parse_object, body) if len(body) > _LARGE else parse_object(body)

    def _check_size(self, characters: int, model: ServedModel) -> None:
        """Refuses what cannot fit, before its tokens are counted, which takes long."""
        context = self._core.context(model)
        if characters > _CHARACTERS_PER_TOKEN * context:
            raise ApiError(
                400,
                f"the text has {characters:,} characters, and the context {context} tokens",
                code="context_length_exceeded",
            )

    async def _grammar(self, text: TextRequest) -> str | None:
        if text.grammar is None:
            return None
        return await trio.to_thread.run_sync(self._core.grammars.compiled, text.grammar)

    def _generation(
        self,
        request: Request,
        text: TextRequest,
        model: ServedModel,
        prompts: Sequence[tuple[int, ...]],
        grammar: str | None,
        *,
        echo: bool = False,
        continues: bool = False,
    ) -> GenerationRequest:
        return GenerationRequest(
            owner=request.state.owner,
            model=model,
            prompts=tuple(prompts),
            sampling=text.sampling,
            max_tokens=text.max_tokens,
            stop=text.stop,
            top_logprobs=text.top_logprobs if text.logprobs else None,
            grammar=grammar,
            echo=echo,
            continues=continues,
        )


async def _body(request: Request, limit: int) -> bytes:
    """
    Raises:
        ApiError: it has more than `limit` bytes.
    """
    too_large = ApiError(413, f"the body has more than {limit:,} bytes", code="request_too_large")
    if int(request.headers.get("content-length", "0")) > limit:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


class _Answers(Response):
    """The response of a request for answers: nothing is computed before it is sent, or when its client has gone."""

    def __init__(self, core: Core, wanted: GenerationRequest, request: TextRequest, writer: Writer, name: str) -> None:
        super().__init__()
        self._core = core
        self._wanted = wanted
        self._request = request
        self._writer = writer
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._core.answering(self._wanted) as events:
            if self._request.stream:
                response = await self._stream(events, send)
            else:
                response = await self._whole(events)
        if response is not None:
            await response(scope, receive, send)

    async def _whole(self, events: trio.MemoryReceiveChannel[Event]) -> Response:
        async for happened in events:
            if isinstance(happened, Failed):
                return _refusal(happened)
            if isinstance(happened, Piece):
                self._writer.take(happened)
            else:
                self._close(happened)
        return JSONResponse(self._writer.whole())

    def _close(self, end: Finished) -> list[dict[str, Any]]:
        chunks = self._writer.close(end)
        # Before the client is told the digest, it can have what that is of.
        self._core.receipts.keep(self._wanted.owner, self._name, self._writer.replies())
        return chunks

    async def _stream(self, events: trio.MemoryReceiveChannel[Event], send: Send) -> Response | None:
        """Nothing is sent before the first token, so that what goes wrong until then has a status of its own."""
        happened = await _waiting(events)
        if isinstance(happened[0], Failed):
            return _refusal(happened[0])
        headers = [(name.lower().encode(), value.encode()) for name, value in _SSE.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        chunks = self._writer.opening()
        while happened:
            for one in happened:
                if isinstance(one, Failed):
                    await _write(send, [*map(event, chunks), event(one.error.fields())], more=False)
                    return None
                chunks += self._close(one) if isinstance(one, Finished) else self._writer.take(one)
            await _write(send, list(map(event, chunks)), more=True)
            chunks = []
            happened = await _waiting(events)
        last = [event(self._writer.usage())] if self._request.include_usage else []
        await _write(send, [*last, DONE], more=False)
        return None


async def _waiting(events: trio.MemoryReceiveChannel[Event]) -> list[Event]:
    """The next event with all that has come meanwhile, pieces of one choice merged; empty at the end."""
    found: list[Event] = []
    pieces: list[Piece] = []
    try:
        happened: Event = await events.receive()
        while True:
            if isinstance(happened, Piece):
                pieces.append(happened)
            else:
                found += [*merged(pieces), happened]
                pieces = []
            happened = events.receive_nowait()
    except (trio.EndOfChannel, trio.WouldBlock):
        return [*found, *merged(pieces)]


async def _write(send: Send, parts: Sequence[bytes], *, more: bool) -> None:
    if parts or not more:
        await send({"type": "http.response.body", "body": b"".join(parts), "more_body": more})


def _refusal(failed: Failed) -> Response:
    return JSONResponse(failed.error.fields(), failed.error.status, failed.error.headers)
