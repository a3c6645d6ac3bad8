"""py-libp2p's Yamux: a write fails when the peer opens no window for 5 s, and a frozen peer is never noticed."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from libp2p.network.config import ConnectionConfig
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux.yamux import YamuxStream

CURED = "py-libp2p has cured it: docs/decisions/yamux-and-noise.md says what can be thrown away"


@pytest.mark.virtual_time
async def test_reader_that_pauses_for_5_seconds_ends_write() -> None:
    connection: Any = object()
    stream = YamuxStream(1, connection, True)
    stream.send_window = 0
    begun = trio.current_time()
    with trio.move_on_after(60):
        with pytest.raises(MuxedStreamError):
            await stream.write(b"more than the reader has taken")
        assert trio.current_time() - begun < 10, CURED
        return
    pytest.fail(CURED)


def test_nobody_watches_whether_the_peer_is_alive() -> None:
    assert not ConnectionConfig().enable_health_monitoring, CURED
