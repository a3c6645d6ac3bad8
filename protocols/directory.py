"""What a node answers to any peer: announcements it holds, its own NodeInfo, manifests, and a measured transfer.

- `/petalnode/directory/1`: all announcements that the peer holds, a page of records per query in the order of the peer
  ids; `after` continues where the last page ended. The reader checks every record, so a directory can hide servers but
  never invent or alter one. NodeInfo says what the answering node is, server or not; it is not passed on.
- `/petalnode/manifest/1`: the manifest of a model version, the digests that make the version. The receiver checks that
  the manifest's hash is the version that it asked for.
- `/petalnode/transfer/1`: a payload each way on one stream, to measure bytes a second between two peers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from ..crypto.identity import peer_id_to_bytes
from . import wire_pb2 as wire
from .announcement import BadAnnouncement, RelayOffer, SignedAnnouncement, open_signed
from .framing import MessageStream, ProtocolError
from .ids import StreamProtocol


@dataclass(frozen=True)
class DirectoryLimits:
    """The sizes of messages of a directory, of manifests and transfers, and how round trips are measured."""

    max_page: int = 512 * 1024  # bytes of records in one reply
    max_pages: int = 32  # that one asks of one peer
    max_ping: int = 64  # bytes
    transfer_bytes: int = 256 * 1024
    """Bytes each way, at most."""
    transfer_rounds: int = 3
    """Of one stream, at most."""
    max_text: int = 256  # characters
    large: int = 1024
    """Bytes: most announcements have fewer."""
    pings: int = 4  # of a measurement of a round trip
    far: float = 0.02  # seconds of a round trip in which the few milliseconds that opening a stream takes are lost
    agree: float = 1.5  # times one round trip that another one of the same way takes at most, if nothing held it up


DIRECTORY_LIMITS: Final = DirectoryLimits()
DIRECTORY: Final = StreamProtocol(
    "/petalnode/directory/1",
    wire.DirectoryFrame,
    max_header=DIRECTORY_LIMITS.max_page + 64 * 1024,
    max_payload=0,
)
MANIFEST: Final = StreamProtocol(
    "/petalnode/manifest/1",
    wire.ManifestFrame,
    max_header=1024 * 1024,  # 4096 blocks take 140 KB, and the configuration a few
    max_payload=0,
)
TRANSFER: Final = StreamProtocol(
    "/petalnode/transfer/1", wire.TransferFrame, max_payload=DIRECTORY_LIMITS.transfer_bytes
)
DirectoryStream = MessageStream[wire.DirectoryFrame]
TransferStream = MessageStream[wire.TransferFrame]


@dataclass(frozen=True)
class NodeInfo:
    """What a node says of itself when asked; nobody vouches for it.

    `role` is "server", "bootstrap" or "client", `reachability` a line for a person. `relay` is None if it relays for
    nobody. Else it carries `circuits` now, and has carried `relayed_bytes` since it started. `time`: its clock when it
    answered, seconds since 1970.
    """

    role: str
    software_version: str = ""
    reachability: str = ""
    relay: RelayOffer | None = None
    circuits: int = 0
    relayed_bytes: int = 0
    time: float = 0.0

    def to_frame(self) -> wire.DirectoryFrame:
        info = wire.NodeInfo(
            role=self.role,
            software_version=self.software_version,
            reachability=self.reachability[: DIRECTORY_LIMITS.max_text],
            relay=self.relay.to_wire() if self.relay is not None else None,
            circuits=self.circuits,
            relayed_bytes=self.relayed_bytes,
            time_ms=round(self.time * 1000),
        )
        return wire.DirectoryFrame(node=info)

    @classmethod
    def of(cls, message: wire.NodeInfo) -> NodeInfo:
        return cls(
            role=_readable(message.role),
            software_version=_readable(message.software_version),
            reachability=_readable(message.reachability),
            relay=RelayOffer.of(message),
            circuits=message.circuits,
            relayed_bytes=message.relayed_bytes,
            time=message.time_ms / 1000,
        )


def _readable(text: str) -> str:
    return "".join(char for char in text[: DIRECTORY_LIMITS.max_text] if char.isprintable())


def size_in_page(record: SignedAnnouncement) -> int:
    """Bytes that a record takes in a page, at most."""
    return len(record.announcement) + len(record.signature) + 16


def records_page(records: Iterable[SignedAnnouncement], *, after: bytes = b"", limit: int = 0) -> wire.DirectoryFrame:
    """A reply with the records whose peer id lies behind `after`, as many as fit."""
    page = wire.DirectoryRecords()
    size = 0
    for record in sorted(records, key=lambda record: record.key):
        if record.key <= after:
            continue
        size += size_in_page(record)
        if size > DIRECTORY_LIMITS.max_page or (limit and len(page.records) >= limit):
            page.truncated = True
            break
        page.records.append(record.to_wire())
    return wire.DirectoryFrame(records=page)


def checked_records(
    page: wire.DirectoryRecords, known: Mapping[str, SignedAnnouncement], *, now: float
) -> Iterator[SignedAnnouncement | None]:
    """The announcements of a page, one at a time, None for each bad one. `now` in seconds since 1970.

    What is byte for byte the announcement in `known` is not checked again: signatures cost 0.1 ms each.
    """
    held = {record.signature: record for record in known.values()} if page.records else {}
    for message in page.records:
        record = held.get(message.signature)
        if record is not None and record.announcement != message.announcement:
            record = None
        if record is None:
            with contextlib.suppress(BadAnnouncement):
                record = open_signed(message, now=now)
        yield record


def last_peer_id(page: wire.DirectoryRecords) -> bytes:
    """Where the next page starts; empty if the page says nothing about it."""
    if not page.records:
        return b""
    try:
        return wire.Announcement.FromString(page.records[-1].announcement).peer_id
    except DecodeError:
        return b""


async def ask_page(stream: DirectoryStream, query: wire.DirectoryQuery, *, timeout: float) -> wire.DirectoryRecords:
    """
    Raises:
        PeerError: no answer within `timeout` seconds, or none that fits.
    """
    if query.max_bytes:  # more than that, and what the asked peer announces itself, only of who does not know the field
        stream.max_header = query.max_bytes + query.limit * DIRECTORY_LIMITS.large
    await stream.send(wire.DirectoryFrame(query=query), timeout=timeout)
    reply, _payloads = await stream.receive(timeout=timeout)
    if reply.WhichOneof("body") != "records":
        raise ProtocolError(f"{stream.peer_id} answered no records", stream.peer_id)
    return reply.records


async def ask_own(stream: DirectoryStream, *, now: float, timeout: float) -> SignedAnnouncement:
    """What the asked server announces of itself at this moment. `now` in seconds since 1970.

    Raises:
        PeerError: no answer within `timeout` seconds, or another one: nothing, or an announcement of somebody else.
    """
    key = peer_id_to_bytes(stream.peer_id)
    before = (int.from_bytes(key, "big") - 1).to_bytes(len(key), "big")
    page = await ask_page(stream, wire.DirectoryQuery(after=before, limit=1), timeout=timeout)
    if len(page.records) != 1:
        raise ProtocolError(f"{stream.peer_id} does not announce itself", stream.peer_id)
    try:
        record = open_signed(page.records[0], now=now)
    except BadAnnouncement as error:
        raise ProtocolError(f"{stream.peer_id} gave a bad announcement: {error}", stream.peer_id) from error
    if record.content.peer_id != stream.peer_id:
        raise ProtocolError(f"{stream.peer_id} gave the announcement of another server", stream.peer_id)
    return record


async def measure_round_trip(stream: DirectoryStream, *, timeout: float) -> float:
    """The least round trip of several pings, in seconds; of two if the peer is far away and they agree.

    Raises:
        PeerError: no answer within `timeout` seconds, or none that fits.
    """
    best = float("inf")
    for turn in range(DIRECTORY_LIMITS.pings):
        frame = wire.DirectoryFrame(ping=wire.Ping(payload=turn.to_bytes(1, "big")))
        start = time.perf_counter()
        await stream.send(frame, timeout=timeout)
        reply, _ = await stream.receive(timeout=timeout)
        elapsed = time.perf_counter() - start
        if reply != frame:
            raise ProtocolError(f"{stream.peer_id} answered another ping", stream.peer_id)
        before = best
        if turn > 0 or elapsed > DIRECTORY_LIMITS.far:  # the first one waits for the stream to be opened, too
            best = min(best, elapsed)
        if (
            best > DIRECTORY_LIMITS.far
            and before < DIRECTORY_LIMITS.agree * elapsed
            and elapsed < DIRECTORY_LIMITS.agree * before
        ):
            break  # a machine that was busy for a moment looks far away, but not as far again
    return best


# --- manifests


async def ask_manifest(
    stream: MessageStream[wire.ManifestFrame], model_version: bytes, *, timeout: float
) -> wire.Manifest | None:
    """The manifest of `model_version` (32 bytes), not yet checked; None if the peer has none.

    Raises:
        PeerError: no answer, or none that fits.
    """
    query = wire.ManifestFrame(query=wire.ManifestQuery(model_version=model_version))
    await stream.send(query, timeout=timeout)
    reply, _ = await stream.receive(timeout=timeout)
    if reply.WhichOneof("body") == "manifest":
        return reply.manifest
    if reply.WhichOneof("body") == "error" and reply.error.code == wire.ERROR_NOT_FOUND:
        return None
    raise ProtocolError(
        f"{stream.peer_id} answered no manifest: {_readable(reply.error.message[:200])}", stream.peer_id
    )


async def answer_manifests(
    stream: MessageStream[wire.ManifestFrame], manifests: dict[bytes, wire.Manifest], *, timeout: float
) -> None:
    """Answers the queries of one stream until it ends (raises PeerError then)."""
    while True:
        frame, _ = await stream.receive(timeout=timeout)
        manifest = manifests.get(frame.query.model_version)
        if manifest is not None:
            await stream.send(wire.ManifestFrame(manifest=manifest), timeout=timeout)
        else:
            error = wire.Error(code=wire.ERROR_NOT_FOUND, message="no manifest of this model version here")
            await stream.send(wire.ManifestFrame(error=error), timeout=timeout)


# --- transfer speed


async def answer_transfer(stream: TransferStream, *, timeout: float) -> None:
    """Sends as many bytes as asked for, once. Raises PeerError if the peer is gone, or asks for too many."""
    frame, _payloads = await stream.receive(timeout=timeout)
    # Or the line would wait for the window, and that be measured.
    stream.widen(2 * DIRECTORY_LIMITS.transfer_bytes)
    wanted = frame.wanted
    if wanted > DIRECTORY_LIMITS.transfer_bytes:
        raise ProtocolError(f"{stream.peer_id} wants {wanted} bytes at once", stream.peer_id)
    await stream.send(wire.TransferFrame(tensors=[wire.Tensor(nbytes=wanted)]), [bytes(wanted)], timeout=timeout)


async def measure_transfer(stream: TransferStream, *, timeout: float) -> float:
    """Seconds that a byte takes to the peer and a byte takes back, together: without the time of the way itself.

    Raises:
        PeerError: the peer did not answer within `timeout` seconds each time, or not with what was asked for.
    """
    empty = await _exchange(stream, 1, timeout)
    empty = min(empty, await _exchange(stream, 1, timeout))
    full = await _exchange(stream, DIRECTORY_LIMITS.transfer_bytes, timeout)
    return max(full - empty, 1e-9) / DIRECTORY_LIMITS.transfer_bytes


async def _exchange(stream: TransferStream, size: int, timeout: float) -> float:
    begun = time.perf_counter()
    frame = wire.TransferFrame(wanted=size, tensors=[wire.Tensor(nbytes=size)])
    await stream.send(frame, [bytes(size)], timeout=timeout)
    _frame, payloads = await stream.receive(timeout=timeout)
    if [len(payload) for payload in payloads] != [size]:
        raise ProtocolError(f"{stream.peer_id} answered other than {size} bytes", stream.peer_id)
    return time.perf_counter() - begun
