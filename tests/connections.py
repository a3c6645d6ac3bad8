"""Waits for connections of a node to end; ports that nobody takes."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

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


def free_port() -> int:
    """One that no connection of other tests gets while nobody listens there: systems choose among higher ones."""
    for port in random.sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")
