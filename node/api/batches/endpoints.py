"""Where OpenAI's /v1/files and /v1/batches are."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import trio
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from ...network.shares import ShareCount
from ..errors import RETRY_SECONDS, ApiError
from ..fields import parse_object
from ..http.answers import page
from ..http.bodies import read_body
from ..parts import metadata
from .objects import ENDPOINTS, batch_object, file_object
from .runner import BatchRunner
from .store import BATCH_STORE, OPEN, NoRoom, StoredBatch, StoredFile


@dataclass(frozen=True)
class UploadLimits:
    """What an upload has beside its file."""

    room_for_form: int = 64 << 10
    body_bytes: int = 64 << 10
    max_name: int = 255


UPLOADS: Final = UploadLimits()
T = TypeVar("T")


def batch_routes(runner: BatchRunner | None) -> list[BaseRoute]:
    """The routes of /v1/files and /v1/batches; without a runner they say how to have one."""
    if runner is None:
        return [
            Route(f"/v1/{kind}{{rest:path}}", _off, methods=["GET", "POST", "DELETE"]) for kind in ("files", "batches")
        ]
    endpoints = _BatchEndpoints(runner)
    return [
        Route("/v1/files", endpoints.upload, methods=["POST"]),
        Route("/v1/files", endpoints.files, methods=["GET"]),
        Route("/v1/files/{name}", endpoints.file, methods=["GET"]),
        Route("/v1/files/{name}", endpoints.drop_file, methods=["DELETE"]),
        Route("/v1/files/{name}/content", endpoints.content, methods=["GET"]),
        Route("/v1/batches", endpoints.create, methods=["POST"]),
        Route("/v1/batches", endpoints.batches, methods=["GET"]),
        Route("/v1/batches/{name}", endpoints.batch, methods=["GET"]),
        Route("/v1/batches/{name}/cancel", endpoints.cancel, methods=["POST"]),
    ]


async def _off(request: Request) -> Response:
    raise ApiError(404, "there are no files and batches here: `petalnode api --batch-file FILE` keeps some", code="off")


class _BatchEndpoints:
    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner
        self._store = runner.store
        self._uploads = ShareCount(math.inf)

    # --- files

    async def upload(self, request: Request) -> Response:
        owner, most = request.state.owner, self._runner.limits.file_bytes
        if not self._uploads.add(owner, most=self._runner.limits.uploads):
            text = f"{self._uploads.of(owner)} files of this key are being uploaded: send this one later"
            raise ApiError(429, text, code="too_many_requests", headers={"Retry-After": str(RETRY_SECONDS)})
        try:
            return JSONResponse(file_object(await self._uploaded(request, owner, most)))
        finally:
            self._uploads.remove(owner)

    async def _uploaded(self, request: Request, owner: str, most: int) -> StoredFile:
        """The body comes to a file on disk, and from there into the store. Raises ApiError."""
        room = await trio.to_thread.run_sync(self._store.room, owner)
        if int(request.headers.get("content-length", "0")) > room + UPLOADS.room_for_form:
            raise ApiError(507, f"there is room for {room:,} bytes of this key: delete some files", code="no_room")
        parser = MultiPartParser(request.headers, _bounded(request, most), max_files=1, max_fields=8)
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError) as error:
            raise ApiError(400, f"the body is no form with a file: {error}", code="invalid_form") from None
        try:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise ApiError(400, "file: it is missing", param="file", code="missing_field")
            if purpose != "batch":
                raise ApiError(400, "purpose: only batch is known here", param="purpose", code="invalid_value")
            name = (file.filename or "file")[: UPLOADS.max_name]
            with _room():
                return await trio.to_thread.run_sync(self._store.add_file, owner, name, purpose, file.file)
        finally:
            await form.close()

    async def files(self, request: Request) -> Response:
        found = await trio.to_thread.run_sync(self._store.files, request.state.owner)
        if purpose := request.query_params.get("purpose"):
            found = [stored for stored in found if stored.purpose == purpose]
        if request.query_params.get("order", "desc") == "asc":
            found.reverse()
        return page(request, [*map(file_object, found)])

    async def file(self, request: Request) -> Response:
        return JSONResponse(file_object(await self._file(request)))

    async def drop_file(self, request: Request) -> Response:
        stored = await self._file(request)
        await trio.to_thread.run_sync(self._store.drop_file, stored.owner, stored.id)
        return JSONResponse({"id": stored.id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        stored = await self._file(request)
        headers = {"Content-Length": str(stored.bytes)}
        return StreamingResponse(self._pieces(stored), media_type="application/jsonl", headers=headers)

    async def _pieces(self, stored: StoredFile) -> AsyncGenerator[bytes, None]:
        for start in range(0, stored.bytes, BATCH_STORE.piece_bytes):
            yield await trio.to_thread.run_sync(self._store.piece, stored.owner, stored.id, start)

    async def _file(self, request: Request) -> StoredFile:
        name = request.path_params["name"]
        return _found(await trio.to_thread.run_sync(self._store.file, request.state.owner, name), "file", name)

    # --- batches

    async def create(self, request: Request) -> Response:
        owner, body = request.state.owner, await read_body(request, UPLOADS.body_bytes)
        fields = parse_object(body, UPLOADS.body_bytes)
        endpoint = fields.one_of("endpoint", ENDPOINTS, "")
        fields.one_of("completion_window", ("24h",), "")
        name = fields.text("input_file_id")
        file = await trio.to_thread.run_sync(self._store.file, owner, name)
        if file is None:
            raise fields.wrong("input_file_id", f"there is no file {name[:100]!r}", "not_found")
        if file.purpose != "batch":
            raise fields.wrong("input_file_id", f"the file is for {file.purpose}, and not for batch")
        if await trio.to_thread.run_sync(self._store.open_batches, owner) >= self._runner.limits.open_batches:
            text = f"{self._runner.limits.open_batches} batches are not over: wait for some, or cancel them"
            raise ApiError(429, text, code="too_many_batches")
        now = int(time.time())
        batch = StoredBatch(
            f"batch_{secrets.token_hex(12)}", owner, endpoint, name, "validating", now, {"metadata": metadata(fields)}
        )
        with _room():
            await trio.to_thread.run_sync(self._store.add_batch, batch)
        self._runner.wake()
        return JSONResponse(batch_object(batch))

    async def batches(self, request: Request) -> Response:
        found = await trio.to_thread.run_sync(self._store.batches, request.state.owner)
        return page(request, [*map(batch_object, found)])

    async def batch(self, request: Request) -> Response:
        return JSONResponse(batch_object(await self._batch(request)))

    async def cancel(self, request: Request) -> Response:
        batch = await self._batch(request)
        if batch.status not in OPEN:
            raise ApiError(409, f"the batch is {batch.status}", code="invalid_status")
        if batch.status != "cancelling":
            with _room():
                await trio.to_thread.run_sync(self._store.set_status, batch.id, "cancelling")
            self._runner.wake()
        return await self.batch(request)

    async def _batch(self, request: Request) -> StoredBatch:
        name = request.path_params["name"]
        return _found(await trio.to_thread.run_sync(self._store.batch, request.state.owner, name), "batch", name)


def _found(found: T | None, kind: str, name: str) -> T:
    """Raises ApiError if this owner has none of this name."""
    if found is None:
        raise ApiError(404, f"there is no {kind} {name[:100]!r}", code="not_found")
    return found


@contextmanager
def _room() -> Iterator[None]:
    """Says that there is no room for what is to be kept."""
    try:
        yield
    except NoRoom as error:
        raise ApiError(507, str(error), code="no_room") from None


async def _bounded(request: Request, most: int) -> AsyncGenerator[bytes, None]:
    """Raises ApiError behind `most` bytes of a file."""
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most + UPLOADS.room_for_form:
            raise ApiError(413, f"a file may have {most:,} bytes", code="request_too_large")
        yield chunk
