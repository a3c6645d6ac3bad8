"""A service of this machine that nobody may be led to."""

from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager

from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.network.host import Host, open_host


class Trap:
    """A service of the victim's machine."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.addr = f"/ip4/127.0.0.1/tcp/{self._socket.getsockname()[1]}"

    @property
    def was_dialed(self) -> bool:
        try:
            self._socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def victim() -> AbstractAsyncContextManager[Host]:
    """A node that others can dial, on all interfaces."""
    listen = [Multiaddr("/ip4/0.0.0.0/tcp/0")]
    return open_host(Identity.generate(), listen=listen, announce=[], psk=None)
