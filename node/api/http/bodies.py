"""Reading what a request asks: its body within a bound, and a long one in a thread, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio
from starlette.requests import Request

from ..engine.core import Core
from ..errors import ApiError
from ..fields import Fields, parse_object

_LARGE: Final = 16 << 10
"""Bytes of a body, of which more are not parsed in the loop. As many empty lists take a millisecond or two."""

T = TypeVar("T")


async def read_asked(request: Request, core: Core, parse: Callable[[Fields], T]) -> T:
    """What `parse`, a pure function, makes of a request's body.

    Keys take turns with long bodies: who sends many waits for his own.

    Raises:
        ApiError: the body is too long or no JSON object, or as `parse`.
    """
    limit = core.limits.body_bytes
    body = await read_body(request, limit)
    if len(body) <= _LARGE:
        return parse(parse_object(body, limit))
    async with core.turns.turn(request.state.owner):
        return await trio.to_thread.run_sync(lambda: parse(parse_object(body, limit)))


async def read_fields(request: Request, core: Core) -> Fields:
    return await read_asked(request, core, lambda fields: fields)


async def read_body(request: Request, limit: int) -> bytes:
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
