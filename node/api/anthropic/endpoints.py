"""Where Anthropic's endpoints are."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..engine.core import Core
from ..engine.preparing import chat_prompt, prepare_chat
from ..errors import MESSAGES_PATH
from ..http.answers import Answers
from ..http.bodies import read_asked
from .requests import parse_messages
from .writer import MessageWriter


def anthropic_routes(core: Core) -> list[BaseRoute]:
    """The routes of /v1/messages."""
    return [
        Route(MESSAGES_PATH, partial(_create, core), methods=["POST"]),
        Route(f"{MESSAGES_PATH}/count_tokens", partial(_count, core), methods=["POST"]),
    ]


async def _create(core: Core, request: Request) -> Response:
    asked = await read_asked(request, core, parse_messages)
    prepared = await prepare_chat(core, request.state.owner, asked)
    return Answers(core, prepared.generation, MessageWriter(asked.text, prepared, request.state.request_id))


async def _count(core: Core, request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    asked = await read_asked(request, core, partial(parse_messages, counted=True))
    prompt = await chat_prompt(core, core.model(asked.text.model), asked)
    return JSONResponse({"input_tokens": len(prompt)})
