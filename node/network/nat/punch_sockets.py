"""TCP sockets that dial from a given port, as punching needs them: a NAT gives one port of a machine one outside."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from typing import Final

import trio

from .endpoint import Endpoint

# Several sockets, the listening one among them, may then have one port. Windows has the first only.
_SHARED: Final = (socket.SO_REUSEADDR, *([socket.SO_REUSEPORT] if hasattr(socket, "SO_REUSEPORT") else []))
_AGAIN: Final = 0.1  # seconds until a refused try is repeated: the other side's NAT may have opened meanwhile
# Of this machine, not of the way: a repetition would end the same.
_HOPELESS: Final = frozenset({errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.EACCES, errno.EPERM, errno.EAFNOSUPPORT})


@contextlib.asynccontextmanager
async def own_port(version: int, listening: int | None) -> AsyncIterator[int]:
    """The port to dial from over IP `version` for the length of the block: the one listened on, else a free one.

    Raises:
        OSError: this machine has no such IP, or no port free.
    """
    if listening is not None:
        yield listening
        return
    with trio.socket.socket(_family(version), socket.SOCK_STREAM) as holder:
        _share(holder)
        await holder.bind((_any(version), 0))
        yield int(holder.getsockname()[1])


async def dial_from(port: int, target: Endpoint) -> trio.SocketStream:
    """Connects to `target` from that port, trying again when refused, until it works or is cancelled.

    If the other side dials us at the same time from there, the two connections become one (RFC 9293, section 3.5).

    Raises:
        OSError: it cannot work from this machine.
    """
    while True:
        dialing = trio.socket.socket(_family(target.ip.version), socket.SOCK_STREAM)
        try:
            _share(dialing)
            await dialing.bind((_any(target.ip.version), port))
            await dialing.connect((str(target.ip), target.port))
            return trio.SocketStream(dialing)
        except OSError as error:
            dialing.close()
            if error.errno in _HOPELESS:
                raise
        except BaseException:
            dialing.close()
            raise
        await trio.sleep(_AGAIN)


def _share(made: trio.socket.SocketType) -> None:
    for option in _SHARED:
        made.setsockopt(socket.SOL_SOCKET, option, 1)


def _family(version: int) -> socket.AddressFamily:
    return socket.AF_INET6 if version == 6 else socket.AF_INET


def _any(version: int) -> str:
    return "::" if version == 6 else "0.0.0.0"
