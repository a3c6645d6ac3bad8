"""Where OpenAI's endpoints are: models, chats, completions, embeddings, responses; and the receipts of answers.

Responses that the next ones go on from are kept in memory, bounded, each found by its owner only.
"""

from __future__ import annotations

import base64
import json
import struct
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import safetensors.torch
import torch
import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ...client.generation.sampling import Sampling
from ...errors import BadInput, MachineError
from ...trust.receipt_file import SignedReply, to_json
from ...verification.answer_check import check_answers
from ..engine.core import Core
from ..engine.generation import GenerationRequest, ServedModel
from ..engine.preparing import chat_prompt, prepare_chat, prepare_completion, text_prompt
from ..errors import ApiError
from ..fields import Fields
from ..http.answers import AnswersResponse, page
from ..http.bodies import read_asked, read_fields
from ..parts import session_options
from .requests import parse_chat, parse_completion
from .responses import Message, ResponseRequest, ResponseWriter, parse_response
from .writers import ChatWriter, Head, TextWriter

MAX_BYTES: Final = 64 << 20
"""Of all conversations, as JSON."""
MAX_RESPONSES: Final = 4096


@dataclass(frozen=True)
class StoredResponse:
    """A response that is over.

    Attributes:
        items: of its input.
        messages: of the conversation with its answer, as chat templates take them, without instructions.
    """

    response: dict[str, Any]
    items: tuple[dict[str, Any], ...]
    messages: tuple[dict[str, Any], ...]

    @property
    def size(self) -> int:
        """Bytes as JSON, those that it shares with the responses before it counted again."""
        return len(json.dumps([self.response, self.items, self.messages]))


class ResponseStore:
    """The newest responses. When there is no room, the oldest of the owner who has the most goes."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_responses: int = MAX_RESPONSES) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._kept: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, owner: str, name: str, stored: StoredResponse) -> None:
        """One that has no room by itself is not kept."""
        size = stored.size
        if size > self._max_bytes:
            return
        self._kept[owner, name] = stored, size
        self._bytes[owner] += size
        while self._bytes.total() > self._max_bytes or len(self._kept) > self._max_responses:
            most = max(self._bytes, key=lambda owner: self._bytes[owner])
            self.drop(most, next(name for other, name in self._kept if other == most))

    def find(self, owner: str, name: str) -> StoredResponse | None:
        """None if this owner has none of this name (any more)."""
        found = self._kept.get((owner, name))
        return None if found is None else found[0]

    def drop(self, owner: str, name: str) -> bool:
        """Whether there was one."""
        found = self._kept.pop((owner, name), None)
        if found is None:
            return False
        self._bytes[owner] -= found[1]
        if not self._bytes[owner]:
            del self._bytes[owner]
        return True


def response_routes(core: Core, store: ResponseStore | None = None) -> list[BaseRoute]:
    """The routes of /v1/responses."""
    endpoints = _ResponseEndpoints(core, ResponseStore() if store is None else store)
    return [
        Route("/v1/responses", endpoints.create, methods=["POST"]),
        Route("/v1/responses/input_tokens", endpoints.count, methods=["POST"]),
        Route("/v1/responses/{name}", endpoints.find, methods=["GET"]),
        Route("/v1/responses/{name}", endpoints.drop, methods=["DELETE"]),
        Route("/v1/responses/{name}/input_items", endpoints.items, methods=["GET"]),
    ]


class _ResponseEndpoints:
    def __init__(self, core: Core, store: ResponseStore) -> None:
        self._core = core
        self._store = store

    async def create(self, request: Request) -> Response:
        core, owner = self._core, request.state.owner
        asked = await self._asked(request)
        before = self._before(owner, asked)
        prepared = await prepare_chat(core, owner, asked.chat(before))

        keep = partial(self._keep, owner, asked, before)
        return AnswersResponse(core, prepared.generation, ResponseWriter(asked, prepared, core.text.token_text, keep))

    def _keep(
        self,
        owner: str,
        asked: ResponseRequest,
        before: tuple[Message, ...],
        response: dict[str, Any],
        answer: dict[str, Any],
    ) -> None:
        if asked.store:
            stored = StoredResponse(response, asked.items, (*before, *asked.new, answer))
            self._store.keep(owner, response["id"], stored)

    async def count(self, request: Request) -> Response:
        """How many tokens the prompt of such a request has."""
        asked = await self._asked(request)
        chat = asked.chat(self._before(request.state.owner, asked))
        prompt = await chat_prompt(self._core, self._core.model(asked.text.model), chat)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt)})

    async def find(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(400, "responses are not streamed again", param="stream", code="unsupported_parameter")
        return JSONResponse(self._stored(request.state.owner, request.path_params["name"]).response)

    async def drop(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not self._store.drop(request.state.owner, name):
            raise _unknown(name, None)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def items(self, request: Request) -> Response:
        stored = self._stored(request.state.owner, request.path_params["name"])
        listed = [_listed(index, item) for index, item in enumerate(stored.items)]
        if request.query_params.get("order", "desc") == "desc":
            listed.reverse()
        return page(request, listed, default=20)

    async def _asked(self, request: Request) -> ResponseRequest:
        return await read_asked(request, self._core, parse_response)

    def _before(self, owner: str, asked: ResponseRequest) -> tuple[Message, ...]:
        """What was said up to the response that this one goes on from. Raises ApiError."""
        return () if asked.previous is None else self._stored(owner, asked.previous, "previous_response_id").messages

    def _stored(self, owner: str, name: str, param: str | None = None) -> StoredResponse:
        """Raises ApiError if this owner has no such response."""
        found = self._store.find(owner, name)
        if found is None:
            raise _unknown(name, param)
        return found


def _unknown(name: str, param: str | None) -> ApiError:
    return ApiError(
        404 if param is None else 400,
        f"there is no response {name[:100]!r} (any more): only the newest are kept, in memory",
        param=param,
        code="not_found" if param is None else "previous_response_not_found",
    )


def _listed(index: int, item: dict[str, Any]) -> dict[str, Any]:
    """An item of the input with an id and a type, a message's content in parts."""
    found = {"id": f"item_{index}", "type": "message", **item}
    if found["type"] == "message":
        content = found["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        found["content"] = [_listed_part(found["role"] == "assistant", part) for part in parts]
    if found["type"] in ("message", "function_call", "function_call_output"):
        found["status"] = "completed"
    return found


def _listed_part(answered: bool, part: dict[str, Any]) -> dict[str, Any]:
    """A part of a message, with the fields that one of an answer or of a question has to have."""
    if part.get("type") == "refusal":
        return part
    return (
        {"annotations": [], "logprobs": [], **part, "type": "output_text"}
        if answered
        else {**part, "type": "input_text"}
    )


_GREEDY: Final = Sampling()
_MAX_INPUTS: Final = 64


def openai_routes(core: Core) -> list[BaseRoute]:
    """The routes of OpenAI's endpoints."""
    endpoints = _OpenAIEndpoints(core)
    return [
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/models/{name:path}", endpoints.one_model, methods=["GET"]),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/petalnode/receipts/{name}", endpoints.receipts, methods=["GET"]),
        Route("/v1/petalnode/receipts/{name}/check", endpoints.check, methods=["POST"]),
        Route("/v1/petalnode/hidden_states", endpoints.hidden_states, methods=["POST"]),
        Route("/v1/embeddings", endpoints.embeddings, methods=["POST"]),
    ]


class _OpenAIEndpoints:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._since = int(time.time())
        self._checks = trio.CapacityLimiter(1)

    async def models(self, request: Request) -> Response:
        listed = [self._model(model) for model in self._core.models.values()]
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]}
        return JSONResponse({"object": "list", "data": listed, "has_more": False, **ends})

    async def one_model(self, request: Request) -> Response:
        return JSONResponse(self._model(self._core.model(request.path_params["name"])))

    def _model(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._since,
            "owned_by": "petalnode",
            "max_model_len": self._core.context(model),
            "input_modalities": ["text", *(["image"] if self._core.takes_pictures else [])],
            # As Anthropic's clients read it.
            "type": "model",
            "display_name": model.name,
            "created_at": datetime.fromtimestamp(self._since, UTC).isoformat(),
        }

    async def chat(self, request: Request) -> Response:
        core, asked = self._core, await read_asked(request, self._core, parse_chat)
        prepared = await prepare_chat(core, request.state.owner, asked)
        wanted = prepared.generation
        head = self._head(wanted, "chatcmpl")
        writer = ChatWriter(asked.text, head, core.text.token_text, prepared)
        return AnswersResponse(core, wanted, writer)

    async def completions(self, request: Request) -> Response:
        core, asked = self._core, await read_asked(request, self._core, parse_completion)
        wanted = await prepare_completion(core, request.state.owner, asked)
        head = self._head(wanted, "cmpl")
        writer = TextWriter(asked.text, head, len(wanted.prompts), core.text.token_text)
        return AnswersResponse(core, wanted, writer)

    def _head(self, wanted: GenerationRequest, prefix: str) -> Head:
        return Head(wanted.model.name, prefix, f"fp_{self._core.client.model.version.hex()[:10]}")

    async def embeddings(self, request: Request) -> Response:
        fields = await read_fields(request, self._core)
        fields.refuse(dimensions="a model's hidden states have one size only")
        core, model = self._core, self._core.model(fields.text("model", ""))
        form = fields.one_of("encoding_format", ("float", "base64"), "float")
        pooling = fields.one_of("pooling", ("mean", "last"), "mean")
        vectors, tokens = await embedded(core, request.state.owner, model, fields, pooling)
        data = []
        for index, values in enumerate(vectors):
            packed = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
            data.append({"object": "embedding", "index": index, "embedding": packed if form == "base64" else values})
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": usage})

    async def hidden_states(self, request: Request) -> Response:
        """Outputs of chosen blocks for one text, as a file of safetensors."""
        core, fields = self._core, await read_fields(request, self._core)
        model, options = core.model(fields.text("model", "")), session_options(fields)
        blocks = _blocks(fields, core.client.model.num_blocks)
        prompts = await _inputs(core, fields, model)
        if len(prompts) > 1:
            raise fields.wrong("input", "one text at a time")
        await core.check(GenerationRequest(request.state.owner, model, tuple(prompts), _GREEDY, options=options))
        values = len(prompts[0]) * len(blocks) * core.hidden_size
        if values > core.limits.state_values:
            raise fields.wrong("blocks", f"{values:,} values are too many: {core.limits.state_values:,} at most")
        outputs = await core.block_outputs(model, prompts[0], blocks, options)
        tensors = {f"block.{block}": states.contiguous() for block, states in outputs.items()}
        tensors["tokens"] = torch.tensor(prompts[0])
        about = {"model": model.name, "version": core.client.model.version.hex()}
        data = await trio.to_thread.run_sync(safetensors.torch.save, tensors, about)
        return Response(data, media_type="application/octet-stream")

    async def check(self, request: Request) -> Response:
        """Computes an answer again on this machine, one at a time for all who ask."""
        name, replies = self._replies(request)
        try:
            async with self._checks:
                answers = await trio.to_thread.run_sync(check_answers, self._core.client.model.folder, replies)
        except (BadInput, MachineError) as error:
            raise ApiError(409, f"the answer cannot be computed here: {error}", code="cannot_check") from None
        return JSONResponse({"id": name, "answers": [answer.fields() for answer in answers]})

    def _replies(self, request: Request) -> tuple[str, tuple[SignedReply, ...]]:
        """The name of an answer, and its receipts."""
        name = request.path_params["name"]
        replies = self._core.receipts.find(request.state.owner, name)
        if replies is None:
            raise ApiError(404, f"there are no receipts of an answer {name[:200]!r} (any more)", code="not_found")
        return name, replies

    async def receipts(self, request: Request) -> Response:
        name, replies = self._replies(request)
        tokens = request.query_params.get("tokens") == "true"
        return JSONResponse(await trio.to_thread.run_sync(partial(to_json, name, replies, tokens=tokens)))


async def embedded(
    core: Core, owner: str, model: ServedModel, fields: Fields, pooling: str
) -> tuple[list[list[float]], int]:
    """The normalised hidden states of each text of the field `input`, and how many tokens these have together.

    Raises:
        ApiError: `input` is no text or texts, or too long; or the swarm cannot compute it.
    """
    prompts, options, vectors = await _inputs(core, fields, model), session_options(fields), []
    await core.check(GenerationRequest(owner, model, tuple(prompts), _GREEDY, options=options))
    for prompt in prompts:
        states = await core.hidden_states(owner, model, prompt, options)
        vector = states.mean(0) if pooling == "mean" else states[-1]
        vectors.append(torch.nn.functional.normalize(vector, dim=0).tolist())
    return vectors, sum(map(len, prompts))


async def _inputs(core: Core, fields: Fields, model: ServedModel) -> list[tuple[int, ...]]:
    given = fields.get("input")
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        given = [given]
    if not isinstance(given, list) or not 0 < len(given) <= _MAX_INPUTS:
        raise fields.wrong("input", f"a text, token ids, or a list of up to {_MAX_INPUTS} of either is expected")
    prompts: list[tuple[int, ...]] = []
    for item in given:
        if isinstance(item, str):
            prompts.append(await text_prompt(core, model, item))
        elif isinstance(item, list) and all(type(token) is int and token >= 0 for token in item):
            prompts.append(tuple(item))
        else:
            raise fields.wrong("input", "a text or token ids are expected")
    return prompts


def _blocks(fields: Fields, num_blocks: int) -> list[int]:
    """The blocks that are asked for, ascending; the last one by default. Raises ApiError."""
    given = fields.get("blocks")
    if given is None:
        return [num_blocks - 1]
    if not isinstance(given, list) or not given:
        raise fields.wrong("blocks", "a list of blocks is expected")
    if not all(type(block) is int and 0 <= block < num_blocks for block in given):
        raise fields.wrong("blocks", f"they are numbered from 0 to {num_blocks - 1}")
    return sorted(set(given))
