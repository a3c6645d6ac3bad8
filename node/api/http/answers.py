"""The events of an answer as a response: whole, or as a stream of which nothing is computed that nobody waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ...trust.receipt_file import SignedReply
from ..engine.core import Core
from ..engine.generation import AnswerProgress, Event, Failed, Finished, GenerationRequest, TextPiece
from ..errors import ApiError, error_response

T = TypeVar("T")


class AnswerWriter(Protocol):
    """Takes the events of the core in order, and writes them as an interface has it.

    Attributes:
        media_type: of a stream.
        streams: whether a stream is asked for.
        name: the id of the answer.
    """

    media_type: str
    streams: bool

    @property
    def name(self) -> str: ...

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before the first piece."""

    def take(self, piece: TextPiece) -> list[dict[str, Any]]:
        """The chunks of a piece."""

    def progress(self, now: AnswerProgress) -> list[dict[str, Any]]:
        """The chunks that tell how far a choice is, if the request asks for that."""

    def close(self, end: Finished) -> list[dict[str, Any]]:
        """The chunks at the end of a choice."""

    def ending(self) -> list[dict[str, Any]]:
        """The chunks behind all choices."""

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The chunk that ends a stream in the middle."""

    def replies(self) -> list[SignedReply]:
        """The receipts of the choices that have ended, in their order."""

    def encoded(self, chunk: dict[str, Any] | None) -> bytes:
        """A chunk as it travels; None stands for the end of a stream that was not cut short."""

    def whole(self) -> dict[str, Any]:
        """The response of a request without a stream."""


class AnswersResponse(Response):
    """The response of a request for answers: nothing is computed before it is sent, or when its client has gone."""

    def __init__(self, core: Core, wanted: GenerationRequest, writer: AnswerWriter) -> None:
        super().__init__()
        self._core = core
        self._wanted = wanted
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._core.answering(self._wanted) as events:
            if self._writer.streams:
                refusal = await self._stream(events, send)
            else:
                refusal = await self._whole(events)
        if isinstance(refusal, Failed):
            await error_response(refusal.error, scope)(scope, receive, send)
        elif not self._writer.streams:
            await JSONResponse(self._writer.whole())(scope, receive, send)

    async def _whole(self, events: trio.MemoryReceiveChannel[Event]) -> Failed | None:
        async for happened in events:
            if isinstance(happened, Failed):
                return happened
            self._chunks(happened)
        return None

    def _chunks(self, happened: TextPiece | AnswerProgress | Finished) -> list[dict[str, Any]]:
        if isinstance(happened, TextPiece):
            return self._writer.take(happened)
        return self._writer.progress(happened) if isinstance(happened, AnswerProgress) else self._close(happened)

    def _close(self, end: Finished) -> list[dict[str, Any]]:
        chunks = self._writer.close(end)
        # Before the client is told the digest, it can have what that is of.
        self._core.receipts.keep(self._wanted.owner, self._writer.name, self._writer.replies())
        return chunks

    async def _stream(self, events: trio.MemoryReceiveChannel[Event], send: Send) -> Failed | None:
        """Nothing is sent before the first event, so that what goes wrong until then has a status of its own."""
        writer = self._writer
        happened = await _waiting(events)
        if isinstance(happened[0], Failed):
            return happened[0]
        headers = [(b"content-type", writer.media_type.encode()), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        chunks = writer.opening()
        while happened:
            for one in happened:
                if isinstance(one, Failed):
                    await _write(send, [*map(writer.encoded, [*chunks, writer.failed(one.error)])], more=False)
                    return None
                chunks += self._chunks(one)
            await _write(send, list(map(writer.encoded, chunks)), more=True)
            chunks = []
            happened = await _waiting(events)
        await _write(send, list(map(writer.encoded, [*writer.ending(), None])), more=False)
        return None


async def _waiting(events: trio.MemoryReceiveChannel[Event]) -> list[Event]:
    """The next event with all that has come meanwhile, pieces of one choice merged; empty at the end."""
    found: list[Event] = []
    pieces: list[TextPiece] = []
    try:
        happened: Event = await events.receive()
        while True:
            if isinstance(happened, TextPiece):
                pieces.append(happened)
            else:
                found += [*_merged(pieces), happened]
                pieces = []
            happened = events.receive_nowait()
    except (trio.EndOfChannel, trio.WouldBlock):
        return [*found, *_merged(pieces)]


def _merged(pieces: Sequence[TextPiece]) -> list[TextPiece]:
    """Pieces of the same choice as one, in the order in which their choices first came."""
    found: dict[int, TextPiece] = {}
    for piece in pieces:
        before = found.get(piece.choice)
        found[piece.choice] = (
            piece
            if before is None
            else TextPiece(piece.choice, before.text + piece.text, (*before.tokens, *piece.tokens))
        )
    return list(found.values())


async def _write(send: Send, parts: Sequence[bytes], *, more: bool) -> None:
    if parts or not more:
        await send({"type": "http.response.body", "body": b"".join(parts), "more_body": more})


def page(request: Request, found: Sequence[Mapping[str, Any]], default: int = 100) -> Response:
    """A part of a list of objects with ids: `limit` of them, `default` unless the request says it, behind `after`.

    Raises:
        ApiError: the limit is none.
    """
    limit, after = request.query_params.get("limit", str(default)), request.query_params.get("after")
    if not limit.isdecimal() or not 0 < len(limit) <= 5 or not 1 <= int(limit) <= 10_000:
        raise ApiError(400, "limit: from 1 to 10000", param="limit", code="invalid_value")
    names = [str(one["id"]) for one in found]
    start = names.index(after) + 1 if after in names else 0
    end = start + int(limit)
    ends = (
        {"first_id": names[start], "last_id": names[start:end][-1]}
        if names[start:]
        else {"first_id": "", "last_id": ""}
    )
    return JSONResponse({"object": "list", "data": [*found[start:end]], "has_more": end < len(found), **ends})
