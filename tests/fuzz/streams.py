"""Targets that are handlers of streams: what a peer says in the order that it likes, and how it leaves off.

Conversations begin from valid ones, which get past the first checks. Their frames are changed, dropped, repeated and
cut into other portions; then the peer closes, resets, is silent, or does not read what it is answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import trio
from google.protobuf.message import Message

from petalnode.node.network.host import Host
from petalnode.node.swarm.streams import MessageStreams
from petalnode.node.testing import MemoryStream, stream_pair
from petalnode.protocols.delimited import DelimitedStream
from petalnode.protocols.framing import MessageStream, PeerError
from petalnode.protocols.ids import StreamProtocol
from petalnode.protocols.inference import Refusal
from tests.fuzz.corpus import ATTACKER
from tests.fuzz.harness import Target
from tests.fuzz.mutation import Mutator, frame

ENDINGS: Final = ("close", "silence", "reset", "deaf")


@dataclass(frozen=True)
class Frame:
    """A frame of a valid conversation. `stream` is "PROTOCOL NUMBER"; `payload` the bytes of its tensors."""

    stream: str
    message: Message
    payload: bytes = b""


@dataclass(frozen=True)
class Conversation:
    """`said` are (stream, bytes); `ending` is how the peer leaves off, on all streams."""

    said: tuple[tuple[str, bytes], ...]
    ending: str

    def __len__(self) -> int:
        return sum(len(data) for _, data in self.said)


Repair = Callable[[Mutator, bytes], bytes]
"""What an attacker does with a changed message: signs it, for example."""


def unrepaired(mutator: Mutator, message: bytes) -> bytes:
    return message


def conversation(
    mutator: Mutator, frames: Sequence[Frame], repair: Repair = unrepaired, shares: float = 0.3
) -> Conversation:
    """A changed copy; `shares` of the frames are changed themselves."""
    said = []
    for part in frames:
        header = part.message.SerializeToString()
        if mutator.chance(shares):
            header = repair(mutator, mutator.message(part.message))
        payload = mutator.bytes(part.payload) if part.payload and mutator.chance(0.1) else part.payload
        if payload and mutator.chance(0.15):
            value = mutator.random.choice((b"\xff", b"\0", b"\x7f", b"\x80\x7f"))
            payload = (value * len(payload))[: len(payload)]
        data = frame(header, payload)
        said.append((part.stream, mutator.bytes(data) if mutator.chance(0.05) else data))
    if mutator.chance(0.5):
        order = mutator.order([number.to_bytes(2, "big") for number in range(len(said))])
        said = [said[int.from_bytes(number, "big")] for number in order]
    if mutator.chance(0.2):
        said = said[: mutator.random.randrange(len(said) + 1)]
    portions = [(stream, portion) for stream, data in said for portion in mutator.split(data)]
    return Conversation(tuple(portions), mutator.random.choice(ENDINGS))


class Handlers:
    """The handlers that a node has set, as their streams reach them from the host."""

    is_serving = False

    def __init__(self) -> None:
        self.by_protocol: dict[str, Callable[[Any, str], Awaitable[None]]] = {}
        self.streams = MessageStreams(cast(Host, self))
        self.peer_id = ""

    def set_stream_handler(self, protocol: str, handler: Callable[[Any, str], Awaitable[None]]) -> None:
        self.by_protocol[protocol] = handler

    def origin_of(self, peer_id: str) -> str:
        return peer_id


class Talk:
    """A subject: says conversations to handlers, each stream of them in a task of its own.

    `handler(protocol)` gets (stream, peer id); `state` are the tables that must be as before.
    """

    def __init__(
        self,
        handler: Callable[[str], Callable[[Any, str], Awaitable[None]]],
        state: Callable[[], Mapping[str, int]] = dict,
        logged: set[Any] | None = None,
        peer_id: str = ATTACKER.peer_id,
    ) -> None:
        self._handler = handler
        self._state = state
        self._logged = logged
        self._peer_id = peer_id

    def held(self) -> Mapping[str, int]:
        return self._state()

    async def feed(self, given: Conversation) -> None:
        if self._logged is not None:
            self._logged.clear()  # each kind of error is told once
        failures: list[Exception] = []
        async with trio.open_nursery() as nursery:
            streams: dict[str, MemoryStream] = {}
            ended: list[trio.Event] = []

            async def handle(protocol: str, raw: MemoryStream, done: trio.Event) -> None:
                try:
                    await self._handler(protocol)(raw, self._peer_id)
                except Exception as error:
                    failures.append(error)
                finally:
                    done.set()

            def opened(name: str) -> MemoryStream:
                ours, theirs = stream_pair(1 << 16)
                streams[name] = ours
                ended.append(trio.Event())
                nursery.start_soon(handle, name.partition(" ")[0], theirs, ended[-1])
                if given.ending != "deaf":
                    nursery.start_soon(_drain, ours)
                return ours

            for name, data in given.said:
                await _say(streams.get(name) or opened(name), data)
                await trio.testing.wait_all_tasks_blocked()
            for stream in streams.values():
                if given.ending == "close":
                    await stream.close()
                elif given.ending == "reset":
                    await stream.reset()
            for done in ended:
                await done.wait()
            nursery.cancel_scope.cancel()
        if failures:
            raise failures[0]


async def _say(stream: MemoryStream, data: bytes) -> None:
    try:
        with trio.move_on_after(1.0):  # who does not read what is said need not get it
            await stream.write(data)
    except OSError:
        pass


async def _drain(stream: MemoryStream) -> None:
    try:
        while await stream.read(1 << 20):
            pass
    except OSError:
        pass


def asking(
    name: str,
    share: int,
    ask: Callable[[Any], Awaitable[object]],
    answers: Callable[[Mutator], Sequence[tuple[Message, bytes]]],
    protocol: StreamProtocol[Any] | None,
    *allowed: type[Exception],
    max_header: int = 1 << 20,
    max_payload: int = 1 << 20,
    seconds: float = 400.0,
) -> Target:
    """The side that asks, and is answered something else than it wanted; without `protocol`, as standards have it."""

    def make(mutator: Mutator) -> Conversation:
        frames = [Frame("answer 1", message, payload) for message, payload in answers(mutator)]
        return conversation(mutator, frames, shares=0.6)

    async def handle(raw: Any, peer_id: str) -> None:
        stream: Any = (
            DelimitedStream(raw, peer_id, max_message=max_header)
            if protocol is None
            else MessageStream(raw, replace(protocol, max_header=max_header, max_payload=max_payload), peer_id)
        )
        try:
            await ask(stream)
        except (PeerError, Refusal, *allowed):
            await stream.reset()

    @asynccontextmanager
    async def opened() -> AsyncIterator[Talk]:
        yield Talk(lambda _: handle)

    return Target(name, share, make, opened, seconds, peak=4 << 20)
