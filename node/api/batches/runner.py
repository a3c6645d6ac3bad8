"""Answers the requests of batches with what interactive requests leave, in the process of the API."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio
from starlette.types import ASGIApp, Message

from ..errors import RETRY_SECONDS
from ..fields import BODY
from ..http.admission import AdmissionMiddleware
from .objects import WINDOW_SECONDS, InputFault, read_input, result_line
from .store import BatchLine, BatchStore, NoRoom, StoredBatch, no_room

log = logging.getLogger(__name__)

_LOOK: Final = 60.0
_LATER: Final = (429, 503)
"""Statuses of answers that are asked for again."""
_SWARM_WAIT: Final = float(RETRY_SECONDS)


@dataclass(frozen=True)
class BatchLimits:
    """What batches may have.

    Attributes:
        requests: of one batch.
        file_bytes: of one file.
        slots: requests that are answered at once, those of interactive clients counted.
        open_batches: of one owner, that are not over.
        uploads: of one owner, that come in at once.
        line_bytes: of one request, as `ApiLimits.body_bytes`.
    """

    requests: int = 50_000
    file_bytes: int = 32 << 20
    slots: int = 8
    open_batches: int = 100
    uploads: int = 2
    line_bytes: int = BODY.max_bytes


def free_slots(slots: int, interactive: int, working: int) -> int:
    """How many requests of batches may be begun beside `interactive` others, and those of batches under way."""
    return max(0, slots - interactive - working)


def next_batch(waiting: Sequence[StoredBatch], served: Mapping[str, int]) -> StoredBatch:
    """Whose turn it is, of batches oldest first: the owner who was `served` (a counter) longest ago."""
    return min(waiting, key=lambda batch: served.get(batch.owner, -1))


class BatchRunner:
    """Runs the batches of `store`. Requests that were under way when the process ended are asked again."""

    def __init__(self, store: BatchStore, limits: BatchLimits | None = None) -> None:
        self.store = store
        self.limits = limits or BatchLimits()
        self._wake = trio.Event()
        self._working: dict[tuple[str, int], trio.CancelScope] = {}
        self._handed: dict[str, int] = {}
        self._served: dict[str, int] = {}
        self._count = 0

    def wake(self) -> None:
        """Has it look again: there is a new batch, or room."""
        self._wake.set()

    async def run(self, application: AdmissionMiddleware) -> None:
        """Until cancelled."""
        application.changed = self.wake
        async with trio.open_nursery() as nursery:
            while True:
                self._wake = trio.Event()
                try:
                    batches = list(reversed(await trio.to_thread.run_sync(self.store.batches)))
                    validating = [batch for batch in batches if batch.status == "validating"]
                    for batch in batches:
                        if batch.status != "validating":
                            await self._see_to(batch)
                    if validating:
                        await self._see_to(self._next(validating))
                        self.wake()  # for what it has become, and those that have waited for it
                    await self._fill(application, nursery)
                except sqlite3.Error:  # such as that of a disk that is full
                    log.exception("batches cannot be gone on with for now")
                with trio.move_on_after(_LOOK):
                    await self._wake.wait()

    async def _see_to(self, batch: StoredBatch) -> None:
        """What is to be done for a batch beside answering its requests."""
        try:
            if batch.status == "validating":
                await trio.to_thread.run_sync(self._validate, batch)
            elif batch.status == "cancelling":
                await self._end(batch, "cancelled")
            elif time.time() > batch.created + WINDOW_SECONDS:
                await self._end(batch, "expired")
            elif batch.completed + batch.failed >= batch.total:
                self._handed.pop(batch.id, None)
                await trio.to_thread.run_sync(self.store.finish, batch, "completed")
        except NoRoom as error:
            await trio.to_thread.run_sync(self.store.give_up, batch, str(error))

    def _validate(self, batch: StoredBatch) -> None:
        content = self.store.content(batch.owner, batch.input)
        requests, faults = read_input(content or b"", batch.endpoint, self.limits.requests, self.limits.line_bytes)
        if content is None:
            faults = [InputFault("file_not_found", "the input file has been deleted")]
        if faults:
            errors = {"object": "list", "data": [fault.fields() for fault in faults]}
            self.store.set_status(batch.id, "failed", errors=errors)
            return
        self.store.begin(batch.id, requests)

    async def _end(self, batch: StoredBatch, status: str) -> None:
        scopes = [scope for (name, _), scope in self._working.items() if name == batch.id]
        for scope in scopes:
            scope.cancel()
        if not scopes:  # else its last request wakes this up
            await trio.to_thread.run_sync(self.store.finish, batch, status)

    async def _fill(self, application: AdmissionMiddleware, nursery: trio.Nursery) -> None:
        """Begins as many requests as there are slots."""
        waiting = [
            batch
            for batch in reversed(await trio.to_thread.run_sync(self.store.batches))
            if batch.status == "in_progress"
        ]
        while waiting and free_slots(self.limits.slots, application.running, len(self._working)):
            batch = self._next(waiting)
            behind = self._handed.get(batch.id, 0)
            lines = await trio.to_thread.run_sync(self.store.open_lines, batch.id, behind, 1)
            if not lines:
                waiting.remove(batch)
                continue
            self._handed[batch.id] = lines[0].line
            scope = self._working[batch.id, lines[0].line] = trio.CancelScope()
            nursery.start_soon(self._answer, application.application, batch, lines[0], scope)

    def _next(self, waiting: Sequence[StoredBatch]) -> StoredBatch:
        """Whose turn it is, which he then has had."""
        batch = next_batch(waiting, self._served)
        self._count += 1
        self._served[batch.owner] = self._count
        return batch

    async def _answer(self, application: ASGIApp, batch: StoredBatch, line: BatchLine, scope: trio.CancelScope) -> None:
        try:
            with scope:
                status, body = await _asked(application, batch.owner, batch.endpoint, line.body.encode())
                while status in _LATER:
                    await trio.sleep(_SWARM_WAIT)
                    status, body = await _asked(application, batch.owner, batch.endpoint, line.body.encode())
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self.note, batch, line, status, body)
        finally:
            del self._working[line.batch, line.line]
            self.wake()

    def note(self, batch: StoredBatch, line: BatchLine, status: int, body: bytes) -> None:
        """Keeps the answer to a request."""
        try:
            try:
                self.store.note_result(line, status != 200, result_line(line, status, json.loads(body)))
            except NoRoom as error:
                self._end_without_room(batch, str(error))
        except sqlite3.Error:  # the request is asked again by the next process
            log.exception("the answer to a request of a batch cannot be kept")

    def _end_without_room(self, batch: StoredBatch, message: str) -> None:
        """The answers that there are become files if they can."""
        try:
            self.store.finish(batch, "failed", errors=no_room(message))
        except NoRoom:
            self.store.give_up(batch, message)


@asynccontextmanager
async def open_batches(path: Path | None, limits: BatchLimits | None = None) -> AsyncIterator[BatchRunner | None]:
    """A runner of the batches in a file, for the length of the block; None without one.

    Raises:
        BadInput, MachineError: as `BatchStore`.
    """
    if path is None:
        yield None
        return
    store = await trio.to_thread.run_sync(BatchStore, path)
    try:
        yield BatchRunner(store, limits)
    finally:
        store.close()


@dataclass
class _Exchange:
    """A request to an ASGI application that is all there, and what it is told."""

    waiting: list[Message]
    told: list[Message] = field(default_factory=list)

    async def receive(self) -> Message:
        if self.waiting:
            return self.waiting.pop()
        await trio.sleep_forever()
        raise AssertionError

    async def send(self, message: Message) -> None:
        self.told.append(message)


async def _asked(application: ASGIApp, owner: str, path: str, body: bytes) -> tuple[int, bytes]:
    """What the API answers to a request: the status and the body, which is JSON."""
    exchange = _Exchange([{"type": "http.request", "body": body, "more_body": False}])
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "state": {"owner": owner},
    }
    try:
        await application(scope, exchange.receive, exchange.send)
    except Exception:  # which it has answered with 500 before
        log.exception("a request of a batch has failed in a way that nobody expected")
    status = exchange.told[0]["status"] if exchange.told else 500
    data = b"".join(message.get("body", b"") for message in exchange.told[1:])
    return status, data or b"null"
