"""Agreeing on protocols without waiting (multistream-select, https://github.com/multiformats/multistream-select).

libp2p's own waits for the answer to its greeting before it asks, and for the answer to that before it goes on: two
round trips for the security, two for the muxer, two for every stream. An initiator that asks for one protocol only can
send greeting and question together, and what follows right behind them. A peer that speaks the protocol answers with
the very same bytes. Anything else is noticed when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio
from libp2p.abc import IMultiselectCommunicator
from libp2p.custom_types import StreamHandlerFn, TProtocol
from libp2p.exceptions import ParseError
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import IOException
from libp2p.network.stream.net_stream import NetStream
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import PROTOCOL_NOT_FOUND_MSG, Multiselect
from libp2p.protocol_muxer.multiselect_client import (
    DEFAULT_NEGOTIATE_TIMEOUT,
    MULTISELECT_PROTOCOL_ID,
    MultiselectClient,
)
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.transport.exceptions import SecurityUpgradeFailure
from libp2p.utils import encode_delim
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from .muxed_stream import MuxedStream
from .raw_connection import OtherSwarm

MAX_NAME: Final = 1024
"""Bytes of what a peer says in a round; libp2p's own takes any number, as they come."""
MAX_ROUNDS: Final = 16
"""Times that a peer may ask on one stream; each costs 0.1 ms, and is four bytes."""


def question(protocol: str) -> bytes:
    """What asks a peer for `protocol`, and is its answer if it agrees."""
    return bytes(encode_delim(MULTISELECT_PROTOCOL_ID.encode()) + encode_delim(protocol.encode()))


class OneRoundTrip(MultiselectClient):
    """libp2p's initiator, which takes one round trip if it has one protocol to ask for."""

    async def select_one_of(
        self,
        protocols: Sequence[TProtocol],
        communicator: IMultiselectCommunicator,
        negotiate_timeout: int = DEFAULT_NEGOTIATE_TIMEOUT,
    ) -> TProtocol:
        if len(protocols) != 1 or not isinstance(communicator, MultiselectCommunicator):
            if isinstance(communicator, MultiselectCommunicator):
                communicator = _BufferedWrites(communicator.read_writer)
            agreed = await super().select_one_of(protocols, communicator, negotiate_timeout)
            _agreed(communicator, agreed)
            return agreed
        (protocol,) = protocols
        with trio.move_on_after(negotiate_timeout):
            try:
                await communicator.read_writer.write(question(protocol))
                answers = [await _read(communicator.read_writer), await _read(communicator.read_writer)]
            except (MultiselectCommunicatorError, IOException) as error:
                raise MultiselectClientError(f"the peer went away instead of agreeing on {protocol}") from error
            if answers != [MULTISELECT_PROTOCOL_ID, protocol]:
                raise MultiselectClientError(f"the peer does not speak {protocol}: it answered {answers}")
            _agreed(communicator, protocol)
            return protocol
        raise MultiselectClientError(f"the peer did not agree on {protocol} within {negotiate_timeout} s")


class OneAnswer(Multiselect):
    """libp2p's responder, which answers what came together with one packet.

    A new connection may send ten packets before the first one is acknowledged. With several streams opened at once,
    their negotiation's small packets alone are more. What they negotiate for then waits a round trip.
    """

    async def negotiate(
        self, communicator: IMultiselectCommunicator, negotiate_timeout: int = DEFAULT_NEGOTIATE_TIMEOUT
    ) -> tuple[TProtocol | None, StreamHandlerFn | None]:
        assert isinstance(communicator, MultiselectCommunicator)
        gathering = _BufferedWrites(communicator.read_writer)
        agreed: tuple[TProtocol | None, StreamHandlerFn | None] = await super().negotiate(gathering, negotiate_timeout)
        await gathering.flush()
        _agreed(communicator, agreed[0])
        return agreed


def _agreed(communicator: IMultiselectCommunicator, protocol: TProtocol | None) -> None:
    """Lets the stream, if it is about one, count its bytes for the protocol that was agreed on."""
    stream = getattr(communicator, "read_writer", None)
    muxed = stream.muxed_stream if isinstance(stream, NetStream) else None
    if isinstance(muxed, MuxedStream) and protocol is not None:
        muxed.agree(protocol)


async def _read(stream: ReadWriteCloser) -> str:
    """What the peer says next.

    Raises:
        MultiselectCommunicatorError: it went away, or says what no protocol is called.
    """
    try:
        said = await read_varint_prefixed_bytes_limited(stream, MAX_NAME)
    except (IOException, ParseError) as error:
        raise MultiselectCommunicatorError("the peer went away while protocols were agreed on") from error
    if not said.endswith(b"\n"):
        raise MultiselectCommunicatorError("the peer said what ends in no newline")
    return str(said[:-1], errors="replace")


class _BufferedWrites(MultiselectCommunicator):
    """Keeps what it writes until it would have to wait for the peer. A refusal goes at once.

    What it reads is bounded."""

    def __init__(self, stream: ReadWriteCloser) -> None:
        super().__init__(stream)
        self._kept = b""
        self._rounds = 0

    async def write(self, msg_str: str) -> None:
        self._kept += encode_delim(msg_str.encode())
        if msg_str == PROTOCOL_NOT_FOUND_MSG:
            await self.flush()

    async def read(self) -> str:
        more_is_here = isinstance(self.read_writer, NetStream) and self.read_writer.muxed_stream.has_unread
        if not more_is_here:
            await self.flush()
        self._rounds += 1
        if self._rounds > MAX_ROUNDS:
            raise MultiselectCommunicatorError("the peer asked for too many protocols")
        return await _read(self.read_writer)

    async def flush(self) -> None:
        kept, self._kept = self._kept, b""
        try:
            if kept:
                await self.read_writer.write(kept)
        except IOException as error:
            raise MultiselectCommunicatorError("the peer went away while protocols were agreed on") from error


def reason_of(error: BaseException) -> str:
    """The reason at the bottom of libp2p's chain of errors about a failed dial, for a person."""
    bottom = error
    while True:
        deeper = bottom.exceptions[0] if isinstance(bottom, BaseExceptionGroup) else None
        deeper = deeper or bottom.__cause__ or (None if bottom.__suppress_context__ else bottom.__context__)
        if deeper is None:
            break
        bottom = deeper
    if isinstance(bottom, PeerIDMismatchesPubkey):
        return "a peer with another id is there"
    if isinstance(bottom, OSError) and bottom.strerror:
        return bottom.strerror
    if isinstance(error, SecurityUpgradeFailure) and not isinstance(bottom, OtherSwarm):
        return "what is there is no node of this swarm, or has another swarm key"
    return str(bottom) or type(bottom).__name__
