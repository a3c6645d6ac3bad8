"""How many bytes a second pass between two peers: `/petalnode/transfer/1`, a payload each way on one stream."""

from __future__ import annotations

import time
from typing import Final

from . import wire_pb2 as wire
from .framing import MessageStream, ProtocolError

SIZE: Final = 256 * 1024
"""Bytes each way, at most."""
ROUNDS: Final = 3
"""Of one stream, at most."""

TransferStream = MessageStream[wire.TransferFrame]


async def answer_transfer(stream: TransferStream, *, timeout: float) -> None:
    """Sends as many bytes as asked for, `ROUNDS` times at most. Raises PeerError when the peer is gone or silent."""
    for _ in range(ROUNDS):
        frame, _payloads = await stream.receive(timeout=timeout)
        wanted = frame.wanted
        if wanted > SIZE:
            raise ProtocolError(f"{stream.peer_id} wants {wanted} bytes at once", stream.peer_id)
        reply = wire.TransferFrame(tensors=[wire.Tensor(nbytes=wanted)])
        await stream.send(reply, [bytes(wanted)], timeout=timeout)


async def measure_transfer(stream: TransferStream, *, timeout: float) -> float:
    """Seconds that a byte takes to the peer and a byte takes back, together: without the time of the way itself.

    Raises:
        PeerError: the peer did not answer within `timeout` seconds each time, or not with what was asked for.
    """
    empty = await _exchange(stream, 1, timeout)
    empty = min(empty, await _exchange(stream, 1, timeout))
    full = await _exchange(stream, SIZE, timeout)
    return max(full - empty, 1e-9) / SIZE


async def _exchange(stream: TransferStream, size: int, timeout: float) -> float:
    begun = time.perf_counter()
    frame = wire.TransferFrame(wanted=size, tensors=[wire.Tensor(nbytes=size)])
    await stream.send(frame, [bytes(size)], timeout=timeout)
    _frame, payloads = await stream.receive(timeout=timeout)
    if [len(payload) for payload in payloads] != [size]:
        raise ProtocolError(f"{stream.peer_id} answered other than {size} bytes", stream.peer_id)
    return time.perf_counter() - begun
