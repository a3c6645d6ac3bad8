"""The congestion control of our sockets."""

from __future__ import annotations

import socket

import pytest
import trio

from petalnode.node.network.transport.raw_connection import PromptSockets


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system has no choice of congestion control")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_no_socket_spreads_its_messages_over_time(family):
    try:
        made = PromptSockets().socket(family, socket.SOCK_STREAM)
    except OSError as error:
        pytest.skip(f"no socket of this family here: {error}")
    with made:
        assert not made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr")


async def test_trio_makes_its_sockets_by_it():
    trio.socket.set_custom_socket_factory(PromptSockets())
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream, await listeners[0].accept() as accepted:
        await stream.send_all(b"hello")
        assert await accepted.receive_some() == b"hello"
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            assert datagrams.type == socket.SOCK_DGRAM
    await listeners[0].aclose()
