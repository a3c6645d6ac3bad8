"""Where /v1/responses is; responses that the next ones go on from, in memory, bounded, each found by its owner only."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..engine.core import Core
from ..engine.preparing import chat_prompt, prepare_chat
from ..errors import ApiError
from ..http.answers import AnswersResponse, page
from ..http.bodies import read_asked
from .response_requests import Message, ResponseRequest, parse_response
from .response_writer import ResponseWriter

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
