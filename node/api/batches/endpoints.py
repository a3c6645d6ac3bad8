"""Where OpenAI's /v1/files and /v1/batches are."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, TypeVar

import trio
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..errors import ApiError
from ..http.answers import page, read_fields
from ..parts import metadata
from .objects import ENDPOINTS, batch_object, file_object
from .runner import BatchRunner
from .store import OPEN, NoRoom, StoredBatch, StoredFile

_ROOM_FOR_FORM: Final = 64 << 10
_BODY_BYTES: Final = 64 << 10
_MAX_NAME: Final = 255

T = TypeVar("T")


def batch_routes(runner: BatchRunner | None) -> list[BaseRoute]:
    """The routes of /v1/files and /v1/batches; without a runner they say how to have one."""
    if runner is None:
        return [
            Route(f"/v1/{kind}{{rest:path}}", _off, methods=["GET", "POST", "DELETE"]) for kind in ("files", "batches")
        ]
    endpoints = _Endpoints(runner)
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


class _Endpoints:
    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner
        self._store = runner.store

    # --- files

    async def upload(self, request: Request) -> Response:
        most = self._runner.limits.file_bytes
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
            content = await file.read()
        finally:
            await form.close()
        name = (file.filename or "file")[:_MAX_NAME]
        stored = await _kept(self._store.add_file, request.state.owner, name, purpose, content)
        return JSONResponse(file_object(stored))

    async def files(self, request: Request) -> Response:
        found = await trio.to_thread.run_sync(self._store.files, request.state.owner)
        if purpose := request.query_params.get("purpose"):
            found = [stored for stored in found if stored.purpose == purpose]
        if request.query_params.get("order", "desc") == "asc":
            found.reverse()
        return page(request, list(map(file_object, found)))

    async def file(self, request: Request) -> Response:
        return JSONResponse(file_object(await self._file(request)))

    async def drop_file(self, request: Request) -> Response:
        stored = await self._file(request)
        await trio.to_thread.run_sync(self._store.drop_file, stored.owner, stored.id)
        return JSONResponse({"id": stored.id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        stored = await self._file(request)
        content = await trio.to_thread.run_sync(self._store.content, stored.owner, stored.id)
        return Response(content, media_type="application/jsonl")

    async def _file(self, request: Request) -> StoredFile:
        return await self._found(self._store.file, request, "file")

    # --- batches

    async def create(self, request: Request) -> Response:
        fields, owner = await read_fields(request, _BODY_BYTES), request.state.owner
        endpoint = fields.one_of("endpoint", ENDPOINTS, "")
        fields.one_of("completion_window", ("24h",), "")
        name = fields.text("input_file_id")
        if await trio.to_thread.run_sync(self._store.file, owner, name) is None:
            raise fields.wrong("input_file_id", f"there is no file {name[:100]!r}", "not_found")
        known = await trio.to_thread.run_sync(self._store.batches, owner)
        if sum(batch.status in OPEN for batch in known) >= self._runner.limits.open_batches:
            text = f"{self._runner.limits.open_batches} batches are not over: wait for some, or cancel them"
            raise ApiError(429, text, code="too_many_batches")
        now = int(time.time())
        batch = StoredBatch(
            f"batch_{secrets.token_hex(12)}", owner, endpoint, name, "validating", now, {"metadata": metadata(fields)}
        )
        await _kept(self._store.add_batch, batch)
        self._runner.wake()
        return JSONResponse(batch_object(batch))

    async def batches(self, request: Request) -> Response:
        found = await trio.to_thread.run_sync(self._store.batches, request.state.owner)
        return page(request, list(map(batch_object, found)))

    async def batch(self, request: Request) -> Response:
        return JSONResponse(batch_object(await self._found(self._store.batch, request, "batch")))

    async def cancel(self, request: Request) -> Response:
        batch = await self._found(self._store.batch, request, "batch")
        if batch.status not in OPEN:
            raise ApiError(409, f"the batch is {batch.status}", code="invalid_status")
        if batch.status != "cancelling":
            await _kept(self._store.set_status, batch.id, "cancelling")
            self._runner.wake()
        return await self.batch(request)

    async def _found(self, find: Callable[[str, str], T | None], request: Request, kind: str) -> T:
        """Raises ApiError if this owner has none of this name."""
        name = request.path_params["name"]
        found = await trio.to_thread.run_sync(find, request.state.owner, name)
        if found is None:
            raise ApiError(404, f"there is no {kind} {name[:100]!r}", code="not_found")
        return found


async def _kept(function: Callable[..., T], *values: Any) -> T:
    try:
        return await trio.to_thread.run_sync(function, *values)
    except NoRoom as error:
        raise ApiError(507, str(error), code="no_room") from None


async def _bounded(request: Request, most: int) -> AsyncGenerator[bytes, None]:
    """Raises ApiError behind so many bytes of a file."""
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most + _ROOM_FOR_FORM:
            raise ApiError(413, f"a file may have {most:,} bytes", code="request_too_large")
        yield chunk
