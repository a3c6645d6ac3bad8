"""Pushes between servers: the streams on which a session sends its outputs to the servers that come after it, and which
server before it may push steps into it."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import trio

from ....crypto.identity import peer_id_from_bytes, peer_id_to_bytes
from ....protocols import wire_pb2 as wire
from ....protocols.framing import MessageStream, PeerError
from ....protocols.inference import (
    HASH_BYTES,
    LOOK_BACK,
    PUSH,
    Refusal,
    bad_request,
    receipt_from_wire,
    without_tensors,
)
from ...errors import SwarmError
from ...swarm.swarm import Swarm
from ..steps import StepOutput

PushStream = MessageStream[wire.PushFrame]


@dataclass(frozen=True)
class StepPushPolicy:
    """How long a server tries to push, in seconds, and to how many others."""

    refresh: float = 5.0  # For peers to say where a server is of which only the client has heard
    open: float = 5.0
    timeout: float = 1.0
    bytes_per_second: int = 1 << 20
    """A next server that takes longer than by both to read a push gets it from the client instead."""
    first_pause: float = 1.0
    longest_pause: float = 60.0  # Between two attempts to open a stream that is wanted; the pause doubles
    most_targets: int = 8  # Of one session: more than a client that changes its chain ever needs at once


PUSHES: Final = StepPushPolicy()


class PushConnector:
    """Opens push streams to the servers of a model that come next, as the swarm knows them."""

    def __init__(self, swarm: Swarm, model_version: bytes) -> None:
        self._swarm = swarm
        self._model_version = model_version

    async def open_push(self, peer_id: str, *, direct: bool = False) -> PushStream:
        """A stream for pushes; with `direct`, only on a connection without a relay. Raises PeerError."""
        swarm = self._swarm
        if not swarm.is_connected(peer_id) and peer_id not in swarm.view.records:
            with suppress(SwarmError):  # the client has heard of a server that we have not
                await swarm.refresh(model_version=self._model_version, timeout=PUSHES.refresh)
        return await swarm.new_stream(peer_id, PUSH, timeout=PUSHES.open, direct=direct)

    def watch_direct(self, peer_id: str) -> trio.Event:
        """Set when there is a connection to this peer without a relay."""
        return self._swarm.watch_direct(peer_id)


@dataclass
class _Target:
    stream: PushStream | None = None
    opening: bool = False
    pause: float = PUSHES.first_pause
    not_before: float = field(default_factory=trio.current_time)


class Pushes:
    """Streams from one session to the servers that come after it. Opened in the background: a step never waits.

    On a direct connection if there is one, else through a relay, and again when a direct one is made. A stream that
    cannot be had is tried again after a while, if steps still want it.
    """

    def __init__(self, connector: PushConnector, nursery: trio.Nursery) -> None:
        self._connector = connector
        self._nursery = nursery
        self._known: dict[bytes, _Target] = {}

    def prepare(self, peer: bytes) -> None:
        """Begins to open a stream to `peer`, unless one is open, being opened, or was just refused; or all is over."""
        known = self._known.get(peer)
        if known is None:
            if len(self._known) >= PUSHES.most_targets:
                return
            known = self._known[peer] = _Target()
        over = self._nursery.cancel_scope.cancel_called
        if known.stream is None and not known.opening and not over and trio.current_time() >= known.not_before:
            known.opening = True
            self._nursery.start_soon(self._keep_open, peer, known)

    async def send(self, peer: bytes, push: wire.Push, output: StepOutput) -> bool:
        """Whether the push is on its way; if not, the client has to relay."""
        known = self._known.get(peer)
        if known is None or known.stream is None:
            self.prepare(peer)
            return False
        timeout = PUSHES.timeout + len(output.payload) / PUSHES.bytes_per_second
        try:
            await known.stream.send(
                wire.PushFrame(push=push, tensors=[output.tensor]), [output.payload], timeout=timeout
            )
        except PeerError:
            known.stream = None
            return False
        return True

    async def close(self) -> None:
        for known in self._known.values():
            if known.stream is not None:
                await known.stream.close()

    async def _keep_open(self, peer: bytes, known: _Target) -> None:
        """Opens a stream and sees to it until it ends."""
        try:
            peer_id = peer_id_from_bytes(peer)
            known.stream = stream = await self._connector.open_push(peer_id)
        except (PeerError, ValueError):
            pass  # the client relays
        else:
            begun = trio.current_time()
            await self._see_to(peer_id, known, stream)
            if trio.current_time() - begun > PUSHES.longest_pause:
                known.pause = PUSHES.first_pause
        known.opening = False
        known.not_before = trio.current_time() + known.pause
        known.pause = min(2 * known.pause, PUSHES.longest_pause)

    async def _see_to(self, peer_id: str, known: _Target, stream: PushStream) -> None:
        """Returns when the stream has ended. A relayed one gives way to a direct one as soon as there can be one."""
        while True:
            following = await self._ended_or_direct(peer_id, stream)
            if following is None:
                known.stream = None
                await stream.reset()
                return
            # What was pushed on the old one is still read there, and what comes before its turn waits for it.
            known.stream = following
            await stream.close()
            stream = following

    async def _ended_or_direct(self, peer_id: str, stream: PushStream) -> PushStream | None:
        """None when `stream` has ended; the stream that is to take its place when that can be had before."""
        following: PushStream | None = None
        try:
            async with trio.open_nursery() as nursery:

                async def move() -> None:
                    nonlocal following
                    following = await self._open_direct(peer_id)
                    nursery.cancel_scope.cancel()

                if not stream.direct:
                    nursery.start_soon(move)
                try:
                    # The next server says something only if it does not want the pushes.
                    await stream.receive(timeout=None, admit=without_tensors(peer_id))
                except PeerError:
                    pass
                nursery.cancel_scope.cancel()
        except BaseException:
            if following is not None:
                await following.reset()
            raise
        return following

    async def _open_direct(self, peer_id: str) -> PushStream:
        """A stream without a relay, as soon as there can be one."""
        pause = PUSHES.first_pause
        while True:
            await self._connector.watch_direct(peer_id).wait()
            try:
                return await self._connector.open_push(peer_id, direct=True)
            except PeerError:
                await trio.sleep(pause)
                pause = min(2 * pause, PUSHES.longest_pause)


class Upstream:
    """Who may push steps into a session: one server at a time, the one before this one in the client's chain.

    First it is who `Open.upstream` names, or the client itself if that is empty. When the client has put another server
    in its place, a step that the client sends says so. `Step.previous_receipt` is the hash of that server's receipt.
    Its next receipt, which comes with its first push, follows this one. Nobody else knows that hash.
    """

    def __init__(self, opened: bytes, client: str) -> None:
        self._peer = opened or peer_id_to_bytes(client)
        self._named = b""
        self._used: deque[bytes] = deque(maxlen=2 * LOOK_BACK)

    def relayed(self, step: wire.Step) -> None:
        """The client has sent `step` itself."""
        self._named = step.previous_receipt or self._named
        self._used.append(step.previous_receipt)

    def check_fresh(self, step: wire.Step) -> None:
        """Whether the receipt of a push is a new one. What the client knows to be used, no server takes once more.

        Raises:
            Refusal: ERROR_BAD_REQUEST.
        """
        if step.previous_receipt and step.previous_receipt in self._used:
            raise bad_request("the pusher's receipt came with an earlier step")

    def check(self, pusher: str, push: wire.Receipt) -> None:
        """Whether a push may come from `pusher`. Its receipt is not checked yet.

        Raises:
            Refusal: ERROR_NOT_ALLOWED.
        """
        if peer_id_to_bytes(pusher) != self._peer and not (self._named and push.previous_receipt == self._named):
            raise Refusal(wire.ERROR_NOT_ALLOWED, f"{pusher} is not the server before this one in the session's chain")

    def checks(
        self, receipt: wire.Receipt, pusher: str, client: str, step: wire.Step, later: bool
    ) -> tuple[bytes, PushedReceipt | None]:
        """Checks a pushed step: what its payload has to hash to, and what is left to check `later`, if anything may be.

        Raises:
            Refusal: `pusher` is not the server before this one, or the receipt is no new one for this step.
        """
        self.check(pusher, receipt)
        self.check_fresh(step)
        pushed = PushedReceipt(receipt, pusher, client, step)
        if later and len(receipt.reply_hash) == HASH_BYTES:
            return receipt.reply_hash, pushed
        pushed.check()
        return receipt.reply_hash, None

    def pushed(self, pusher: str, receipt: bytes = b"") -> None:
        """A push of `pusher` was in order; `receipt` is the hash of the one that came with it."""
        self._peer = peer_id_to_bytes(pusher)
        self._used.append(receipt)


@dataclass(frozen=True)
class PushedReceipt:
    """What `pusher` has sent as its receipt for what it pushes as `step` for `client`."""

    message: wire.Receipt
    pusher: str
    client: str
    step: wire.Step

    def check(self) -> None:
        """Raises Refusal: it is none, or for something else."""
        try:
            receipt = receipt_from_wire(self.message)
        except ValueError as error:
            raise bad_request(f"the receipt cannot be read: {error}") from None
        if (
            receipt.client != self.client
            or len(receipt.reply_hash) != HASH_BYTES
            or receipt.hash() != self.step.previous_receipt
            or not receipt.is_signed_by(self.pusher)
        ):
            raise bad_request("the pusher's receipt is not for what it pushed")
