"""py-libp2p's WebTransport: a stream that is not read for a moment loses what comes, in silence."""

from __future__ import annotations

from typing import Any

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from libp2p.transport.webtransport.stream import WebTransportStream

CURED = "py-libp2p has cured it: docs/decisions/browser-transports.md says what could be done then"
CHUNKS = 100


async def test_what_comes_before_it_is_read_is_lost() -> None:
    connection: Any = object()
    stream = WebTransportStream(connection, 0, False)
    for number in range(CHUNKS):
        stream.on_data(bytes([number]) * 1200, stream_ended=number == CHUNKS - 1)
    received = 0
    with trio.move_on_after(60):
        while True:
            try:
                received += len(await stream.read())
            except MuxedStreamEOF:
                break
    assert received < CHUNKS * 1200, CURED
