"""Where /v1/responses is, and what was said in the responses that are kept."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..engine.core import Core
from ..engine.preparing import chat_prompt, prepare_chat
from ..errors import ApiError
from ..http.answers import Answers, read_fields
from .response_requests import Message, ResponseRequest, parse_response
from .response_store import ResponseStore, StoredResponse
from .response_writer import ResponseWriter


def response_routes(core: Core, store: ResponseStore | None = None) -> list[BaseRoute]:
    """The routes of /v1/responses."""
    endpoints = _Endpoints(core, store or ResponseStore())
    return [
        Route("/v1/responses", endpoints.create, methods=["POST"]),
        Route("/v1/responses/input_tokens", endpoints.count, methods=["POST"]),
        Route("/v1/responses/{name}", endpoints.find, methods=["GET"]),
        Route("/v1/responses/{name}", endpoints.drop, methods=["DELETE"]),
        Route("/v1/responses/{name}/input_items", endpoints.items, methods=["GET"]),
    ]


class _Endpoints:
    def __init__(self, core: Core, store: ResponseStore) -> None:
        self._core = core
        self._store = store

    async def create(self, request: Request) -> Response:
        core, owner = self._core, request.state.owner
        asked = await self._asked(request)
        before = self._before(owner, asked)
        prepared = await prepare_chat(core, owner, asked.chat(before))

        def keep(response: dict[str, Any], answer: dict[str, Any]) -> None:
            if asked.store:
                stored = StoredResponse(response, asked.items, (*before, *asked.new, answer))
                self._store.keep(owner, response["id"], stored)

        return Answers(core, prepared.generation, ResponseWriter(asked, prepared, core.text.token_text, keep))

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
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]}
        return JSONResponse({"object": "list", "data": listed, "has_more": False, **ends})

    async def _asked(self, request: Request) -> ResponseRequest:
        return parse_response(await read_fields(request, self._core.limits.body_bytes))

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
    if found["type"] == "message" and isinstance(found["content"], str):
        kind = "output_text" if found["role"] == "assistant" else "input_text"
        part: dict[str, Any] = {"type": kind, "text": found["content"]}
        found["content"] = [{**part, "annotations": []} if kind == "output_text" else part]
    if found["type"] in ("message", "function_call", "function_call_output"):
        found["status"] = "completed"
    return found
