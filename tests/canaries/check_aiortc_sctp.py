"""aiortc's SCTP is driven without asyncio, through its private names: `make interop` says what a later one changes.

WebRTC is an extra (docs/decisions/browser-transports.md), so this is no part of `make test`.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from aiortc import RTCDataChannel, RTCDataChannelParameters, rtcsctptransport
from libp2p.transport.webrtc.pb.webrtc_pb2 import Message
from libp2p.transport.webrtc.stream import _frame
from OpenSSL import SSL

from petalnode.node.network.transport.bandwidth import Bandwidth
from petalnode.node.network.transport.limits import NodeLimits
from petalnode.node.network.transport.webrtc import association
from petalnode.node.network.transport.webrtc.association import Association
from petalnode.node.network.transport.webrtc.connection import WebRtcConnection
from petalnode.node.network.transport.webrtc.listener import certificate_of

CHANGED = "aiortc has changed: node/network/transport/webrtc/association.py drives it, and has to follow"
LOOP = {"call_later"}
"""What aiortc asks of its loop, which `_Sctp` is."""


def names_of(tree: ast.AST, owner: str) -> set[str]:
    """The attributes of `owner` that a module uses."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in found if ast.unparse(node.value) == owner}


def test_nothing_else_of_asyncio_is_used() -> None:
    tree = ast.parse(inspect.getsource(rtcsctptransport))
    assert names_of(tree, "asyncio") <= set(vars(association.sctp.asyncio)), CHANGED
    assert names_of(tree, "self._loop") <= LOOP, CHANGED
    awaited = {ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    assert {text.partition("(")[0] for text in awaited} <= {
        f"self.{name}" for name, _ in inspect.getmembers(rtcsctptransport.RTCSctpTransport, inspect.iscoroutinefunction)
    } | {"self.__transport._send_data"}, CHANGED


def test_methods_that_are_replaced_are_there() -> None:
    theirs = rtcsctptransport.RTCSctpTransport
    ours = {name for name, value in vars(association._Sctp).items() if inspect.isfunction(value)}
    own = {"__init__", "call_later", "open", "hold", "ask_for_life"}
    assert {name for name in ours - own if not hasattr(theirs, name)} == set(), CHANGED


def test_other_users_of_aiortc_keep_their_asyncio() -> None:
    assert rtcsctptransport.asyncio is asyncio and association.sctp is not rtcsctptransport


class Side:
    """One end of a line that loses nothing, and what its peer does."""

    def __init__(self, ssl: SSL.Connection, role: str) -> None:
        self.sent: list[bytes] = []
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.heard: list[bytes] = []
        self.alive: list[int] = []
        kind: Any = type("Role", (Association,), {"_role": role})
        self.association: Association = kind(ssl, self)

    def send_datagram(self, data: bytes) -> None:
        self.sent.append(data)

    def on_open(self, channel: int) -> None:
        self.opened.append(channel)

    def on_message(self, channel: int, data: bytes) -> None:
        self.heard.append(data)

    def on_closed(self, channel: int) -> None:
        self.closed.append(channel)

    def on_alive(self, token: int) -> None:
        self.alive.append(token)

    def on_sent(self, size: int) -> None:
        pass


def secured(seed: bytes) -> SSL.Connection:
    key, certificate = certificate_of(seed)
    context = SSL.Context(SSL.DTLS_METHOD)
    context.set_verify(SSL.VERIFY_PEER, lambda *_: True)
    context.use_certificate(certificate)
    context.use_privatekey(key)
    return SSL.Connection(context)


def talk(one: Side, other: Side) -> None:
    """Hands on all that both say."""
    while one.sent or other.sent:
        for side, peer in ((one, other), (other, one)):
            datagrams, side.sent = side.sent, []
            for data in datagrams:
                peer.association.take(data)
    assert one.association.lost is None and other.association.lost is None, (one, other)


@pytest.mark.virtual_time
async def test_two_ends_talk_without_asyncio() -> None:
    """The whole of what is driven: handshakes, channels, messages, heartbeats, channels that end."""
    listening, dialing = secured(b"l" * 32), secured(b"d" * 32)
    listening.set_accept_state()
    dialing.set_connect_state()
    server, client = Side(listening, "server"), Side(dialing, "client")
    talk(client, server)
    assert client.association.is_open and server.association.is_open, CHANGED
    RTCDataChannel(client.association._sctp, RTCDataChannelParameters(id=2))
    client.association._drive()
    talk(client, server)
    assert server.opened == [2], CHANGED
    for side, peer in ((client, server), (server, client)):
        assert side.association.send(2, b"a" * 60_000), side.association.lost
        talk(client, server)
        assert peer.heard == [b"a" * 60_000] and side.association.unacknowledged is None, CHANGED
    server.association.ask_for_life(7)
    talk(client, server)
    assert server.alive == [7], CHANGED
    server.association.close(2)
    talk(client, server)
    assert server.closed == client.closed == [2], CHANGED


@pytest.mark.virtual_time
async def test_end_said_again_is_not_answered_again() -> None:
    """Answers lie here until the peer has acknowledged those before: it could make the node hold any number."""
    listening, dialing = secured(b"l" * 32), secured(b"d" * 32)
    listening.set_accept_state()
    dialing.set_connect_state()
    client = Side(dialing, "client")
    socket: Any = SimpleNamespace(limits=NodeLimits(), bandwidth=Bandwidth(), answer=lambda *_: False)
    socket.send = lambda data, _: client.association.take(data)
    server = WebRtcConnection(listening, ("203.0.113.7", 1), socket)

    def talk_on() -> None:
        while client.sent:
            datagrams, client.sent = client.sent, []
            for data in datagrams:
                server._association.take(data)

    talk_on()
    RTCDataChannel(client.association._sctp, RTCDataChannelParameters(id=2))
    client.association._drive()
    talk_on()
    for _ in range(20):
        assert client.association.send(2, _frame(Message(flag=Message.FIN)))
        talk_on()
    assert server._association.lost is None and client.heard == [_frame(Message(flag=Message.FIN_ACK))]
