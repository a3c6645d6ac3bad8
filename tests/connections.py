"""Waits for connections of a node to end."""

from __future__ import annotations

import trio

from petalnode.node.network.host import Host


def connection_lost(host: Host, peer_id: str) -> trio.Event:
    """An event that is set when the last connection to this peer ends (a frozen peer's within 5 s)."""
    lost = trio.Event()

    def on_lost(ended: str) -> None:
        if ended == peer_id:
            lost.set()

    host.on_lost(on_lost)
    return lost
