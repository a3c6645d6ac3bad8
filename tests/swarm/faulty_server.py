"""A real server that lies: its answers are spoiled between the service and the network, in a process of the tests.

`install(control)` changes this process only. Each session that opens reads `control`, a JSON file such as
{"fault": "shape", "at": 3}: the answer to the third step on that stream is spoiled in that way as often as it is asked
for, and those after it are honest.
No such file, or no fault in it: an honest server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from petalnode.crypto.identity import Identity
from petalnode.node.swarm import swarm as swarm_module
from petalnode.node.testing import MemoryNode
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import MessageStream, PeerError, ProtocolError, StreamClosed
from petalnode.protocols.inference import INFERENCE, Refusal, receipt_from_wire, receipt_to_wire, sha256
from petalnode.protocols.training import BACKWARD, FORWARD, hash_of_payloads
from tests.node_inspection import raw_of

Stream = MessageStream[wire.InferenceFrame]


def install(control: Path) -> None:
    """Makes every server that this process starts from now on a faulty one, in sessions and in training."""
    honest = swarm_module.Swarm.set_handler

    def set_handler(self: Any, protocol: Any, handler: Any, **options: Any) -> None:
        if protocol in _SPOILED:
            handler = _spoiling(handler, control, self.identity, _SPOILED[protocol])
        honest(self, protocol, handler, **options)

    swarm_module.Swarm.set_handler = set_handler  # type: ignore[method-assign]


def spoil(node: MemoryNode, control: Path) -> None:
    """Makes a server in memory a faulty one."""
    honest = node.set_handler

    def set_handler(protocol: Any, handler: Any, **options: Any) -> None:
        if protocol in _SPOILED:
            handler = _spoiling(handler, control, node.identity, _SPOILED[protocol])
        honest(protocol, handler, **options)

    node.set_handler = set_handler  # type: ignore[method-assign]


def order(control: Path, fault: str = "", at: int = 1, *, blocks: str = "", amount: float = 0.0) -> None:
    """Tells a faulty server what to do in sessions that open from now on; `blocks` and `amount`: see `false_blocks`."""
    written = control.with_suffix(".new")
    written.write_text(json.dumps({"fault": fault, "at": at, "blocks": blocks, "amount": amount}))
    written.replace(control)


def ordered(control: Path) -> dict[str, Any]:
    wanted: dict[str, Any] = json.loads(control.read_text()) if control.exists() else {}
    return wanted


def _spoiling(
    handler: Callable[[Any], Awaitable[None]], control: Path, identity: Identity, spoiled: type[Any]
) -> Callable[[Any], Awaitable[None]]:
    async def handle(stream: Any) -> None:
        wanted = ordered(control)
        await handler(spoiled(stream, wanted.get("fault", ""), wanted.get("at", 1), identity))

    return handle


class _Spoiled:
    """A message stream with one answer in it that is not what the service said."""

    def __init__(self, stream: Stream, fault: str, at: int, identity: Identity) -> None:
        self._stream = stream
        self._fault = fault
        self._at = at
        self._identity = identity
        self._steps: list[int] = []  # sequence numbers of what was answered
        self._last: tuple[wire.InferenceFrame, list[bytes]] | None = None
        self._previous: tuple[wire.InferenceFrame, list[bytes]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, frame: wire.InferenceFrame, payloads: Sequence[Any] = (), *, timeout: float) -> None:
        if frame.WhichOneof("body") != "reply":
            await self._stream.send(frame, payloads, timeout=timeout)
            return
        kept = wire.InferenceFrame()
        kept.CopyFrom(frame)
        sent = [bytes(payload) for payload in payloads]
        if frame.reply.sequence not in self._steps:
            self._steps.append(frame.reply.sequence)
            self._previous, self._last = self._last, (kept, sent)
        if self._fault and self._steps.index(frame.reply.sequence) + 1 == self._at:
            await FAULTS[self._fault](self, frame=_copy(kept), payload=sent[0], timeout=timeout)
        else:
            await self._stream.send(frame, payloads, timeout=timeout)

    async def receive(self, **options: Any) -> tuple[wire.InferenceFrame, list[bytes]]:
        try:
            return await self._stream.receive(**options)
        except PeerError as error:
            if self._fault == "reset":  # a stream that only ends leaves a session that may be taken up again
                raise ProtocolError("the test lost the session", error.peer_id) from error
            raise

    # --- faults

    async def garbage(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        await raw_of(self._stream).write(b"\xff" * 64 + os.urandom(4096))

    async def half(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        """The header and half of the bytes, and then nothing for ever."""
        frame.tensors[0].nbytes = len(payload)
        header = frame.SerializeToString()
        length = bytearray()
        size = len(header)
        while size >= 0x80:
            length.append(size & 0x7F | 0x80)
            size >>= 7
        length.append(size)
        await raw_of(self._stream).write(bytes(length) + header + payload[: len(payload) // 2])

    async def silence(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        pass

    async def reset(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        """The server has lost this session and nothing else."""
        await self._stream.reset()
        raise ProtocolError("the test lost the session", self._stream.peer_id)

    async def error(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        refusal = wire.Error(code=wire.ERROR_INTERNAL, message="out of memory")
        await self._stream.send(wire.InferenceFrame(error=refusal), timeout=timeout)

    async def lost(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        """What a server of a hybrid says when it cannot go back so far."""
        refusal = wire.Error(code=wire.ERROR_NOT_FOUND, message="the states are not kept: send again what led there")
        await self._stream.send(wire.InferenceFrame(error=refusal), timeout=timeout)

    async def shape(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        """All of the bytes, said to be of another shape."""
        batch, tokens, hidden = frame.tensors[0].shape
        frame.tensors[0].shape[:] = [batch, hidden, tokens]
        await self._stream.send(frame, [payload], timeout=timeout)

    async def fewer(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        """Half of the bytes under the right shape."""
        frame.tensors[0].nbytes = len(payload) // 2
        await self._stream.send(frame, [payload[: len(payload) // 2]], timeout=timeout)

    async def position(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        frame.reply.position -= 1
        await self._stream.send(frame, [payload], timeout=timeout)

    async def previous(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        """The answer to the step before, once more."""
        assert self._previous is not None, "order it for a later answer than the first"
        await self._stream.send(self._previous[0], self._previous[1], timeout=timeout)

    async def altered(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        """Other bytes than those that the receipt is for."""
        await self._stream.send(frame, [_flipped(payload)], timeout=timeout)

    async def forged(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        """Other bytes, with a receipt for them that nobody signed."""
        spoiled = _flipped(payload)
        frame.reply.receipt.reply_hash = sha256(spoiled)
        await self._stream.send(frame, [spoiled], timeout=timeout)

    async def stranger(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        """Other bytes, with a receipt that another key signed."""
        await self._signed(frame, _flipped(payload), Identity.generate(), timeout)

    async def nan(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        """Values that are no numbers, with a receipt in order."""
        await self._signed(frame, b"\xff" * len(payload), self._identity, timeout)

    async def equivocation(self, frame: wire.InferenceFrame, payload: bytes, timeout: float) -> None:
        """Other bytes than it has pushed to the next server, and a receipt in order for either."""
        if frame.reply.handed_on:
            await self._signed(frame, _flipped(payload), self._identity, timeout)
            return
        self._at += 1  # nobody but the client has this answer
        await self._stream.send(frame, [payload], timeout=timeout)

    async def _signed(self, frame: wire.InferenceFrame, payload: bytes, identity: Identity, timeout: float) -> None:
        frame.reply.receipt.reply_hash = sha256(payload)
        receipt = receipt_from_wire(frame.reply.receipt).signed(identity)
        frame.reply.receipt.CopyFrom(receipt_to_wire(receipt))
        await self._stream.send(frame, [payload], timeout=timeout)


FAULTS: dict[str, Callable[..., Awaitable[None]]] = {
    name: getattr(_Spoiled, name)
    for name in (
        *("garbage", "half", "silence", "reset", "error", "lost", "shape", "fewer"),
        *("position", "previous", "altered", "forged", "stranger", "nan", "equivocation"),
    )
}


class _SpoiledWorks:
    """A stream of batch requests with one reply on it that is not what the service said."""

    gives_gradients = False

    def __init__(self, stream: MessageStream[wire.BatchFrame], fault: str, at: int, identity: Identity) -> None:
        self._stream = stream
        self._fault = fault
        self._at = at
        self._identity = identity
        self._replies = 0
        self._held: wire.BatchFrame | None = None  # a reply, until its bytes are here too

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, frame: wire.BatchFrame, payloads: Sequence[Any] = (), *, timeout: float) -> None:
        if self._fault == "no gradients" and self.gives_gradients and frame.WhichOneof("body") != "error":
            raise Refusal(wire.ERROR_UNSUPPORTED, "no gradients from this server: it is a test")
        if frame.WhichOneof("body") == "reply":
            self._replies += 1
            if self._fault and self._replies == self._at:
                self._held = wire.BatchFrame()
                self._held.CopyFrom(frame)
                return
        if self._held is None:
            await self._stream.send(frame, payloads, timeout=timeout)
            return
        head, self._held = self._held, None
        spoiled = [bytes(payload) for payload in payloads]  # of a small model all bytes are one piece
        match self._fault:
            case "silence":
                return
            case "reset":
                await self._stream.reset()
                raise StreamClosed("the test reset the stream", self._stream.peer_id)
            case "error":
                refusal = wire.Error(code=wire.ERROR_INTERNAL, message="out of luck")
                await self._stream.send(wire.BatchFrame(error=refusal), timeout=timeout)
                return
            case "shape":
                rows, tokens, hidden = head.reply.tensors[0].shape
                head.reply.tensors[0].shape[:] = [tokens, rows, hidden]
            case "altered":
                spoiled[0] = _flipped(spoiled[0])
            case "forged":
                spoiled[0] = _flipped(spoiled[0])
                head.reply.receipt.reply_hash = hash_of_payloads(spoiled)
            case "stranger" | "nan":
                spoiled[0] = _flipped(spoiled[0]) if self._fault == "stranger" else b"\xff" * len(spoiled[0])
                head.reply.receipt.reply_hash = hash_of_payloads(spoiled)
                signer = Identity.generate() if self._fault == "stranger" else self._identity
                receipt = receipt_from_wire(head.reply.receipt).signed(signer)
                head.reply.receipt.CopyFrom(receipt_to_wire(receipt))
        await self._stream.send(head, timeout=timeout)
        await self._stream.send(frame, spoiled, timeout=timeout)


class _SpoiledBackward(_SpoiledWorks):
    gives_gradients = True


_SPOILED: dict[Any, type[Any]] = {INFERENCE: _Spoiled, FORWARD: _SpoiledWorks, BACKWARD: _SpoiledBackward}

WORK_FAULTS = ("reset", "error", "shape", "altered", "forged", "stranger", "nan")
"""Of replies to works; "silence" too, which takes a deadline to be noticed, and "no gradients", a plain refusal."""


def _copy(frame: wire.InferenceFrame) -> wire.InferenceFrame:
    copied = wire.InferenceFrame()
    copied.CopyFrom(frame)
    return copied


def _flipped(payload: bytes) -> bytes:
    return bytes([payload[0] ^ 1]) + payload[1:]
