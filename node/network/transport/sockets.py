"""TCP sockets whose small messages are not held back by the system's congestion control.

BBR, which many servers have as their default, spreads what it sends over time, by a rate that it knows only after
some hundred kilobytes sent at once. A connection that carries a hidden state now and then stays in BBR's start-up
phase, where each message is spread over up to a third of a round trip: measured at 100 ms of round trip, 14 ms
for 8 KiB and 26-32 ms for 16 KiB, in each direction, on plain TCP as well as on ours. CUBIC and Reno send at once
what their window holds.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final

import trio

_SPREADING: Final = b"bbr"  # the start of the names of all its versions
_AT_ONCE: Final = (b"cubic", b"reno")  # systems may keep the first from ordinary users, but not the second


class PromptSockets(trio.abc.SocketFactory):
    """Makes trio's sockets, for `trio.socket.set_custom_socket_factory`.

    The choice must be made before a socket connects or listens: one that has started with BBR keeps on spreading
    whatever it is switched to.
    """

    def socket(
        self,
        family: socket.AddressFamily | int = socket.AF_INET,
        type: socket.SocketKind | int = socket.SOCK_STREAM,
        proto: int = 0,
    ) -> trio.socket.SocketType:
        made = socket.socket(family, type, proto)
        if type & socket.SOCK_STREAM and family in (socket.AF_INET, socket.AF_INET6):
            _send_at_once(made)
        return trio.socket.from_stdlib_socket(made)


def _send_at_once(made: socket.socket) -> None:
    if not hasattr(socket, "TCP_CONGESTION"):
        return
    with contextlib.suppress(OSError):  # a kernel that does not let us choose is used as it is
        if not made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(_SPREADING):
            return
    for name in _AT_ONCE:
        with contextlib.suppress(OSError):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return
