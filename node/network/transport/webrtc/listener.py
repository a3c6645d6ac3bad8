"""The socket that browsers reach: STUN, DTLS's cookies, and whose datagram it is.

Who sends first is asked for a cookie (RFC 6347, section 4.2.1). Only then is anything kept for an address: nobody can
take places in the name of others. STUN is answered from what the question says, as by an agent of ICE Lite.
The certificate follows from the node's key. So an address holds as long as the node's identity does.
"""

from __future__ import annotations

import base64
import errno
import hmac
import logging
import os
import socket
import struct
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import trio
from aioice import stun
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID
from libp2p.abc import IListener, ITransport
from libp2p.custom_types import THandler
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr
from OpenSSL import SSL

from ...addresses import host_of, is_webrtc, port_of
from ...shares import ShareCount, origin_of_ip
from ..bandwidth import Bandwidth
from ..limits import LIMITS, WORK, NodeLimits
from .association import WEBRTC
from .connection import Source, WebRtcConnection

log = logging.getLogger(__name__)

_VERSIONS: Final = ("libp2p+webrtc+v1/", "libp2p+webrtc+v2/")
_HELLO: Final = bytes.fromhex(f"16feff{0:016x}0036 01{42:06x}{0:010x}{42:06x} fefd{0:064x} 00 00 0002c02b 0100")
"""A record with a ClientHello of DTLS 1.2 without a cookie."""


def certificate_of(seed: bytes) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """A key of P-256 and its certificate, always the same ones for the seed of an identity."""
    material = HKDF(SHA256(), 64, salt=None, info=b"petalnode/webrtc/1").derive(seed)
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    key = ec.derive_private_key(int.from_bytes(material[:48], "big") % (order - 1) + 1, ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "WebRTC")])
    # Firefox refuses a second certificate with the name and the number of another one.
    serial = int.from_bytes(material[48:], "big") + 1
    builder = x509.CertificateBuilder(name, name, key.public_key(), serial_number=serial)
    # Browsers look at the fingerprint alone.
    builder = builder.not_valid_before(datetime(2020, 1, 1, tzinfo=UTC)).not_valid_after(
        datetime(2120, 1, 1, tzinfo=UTC)
    )
    return key, builder.sign(key, SHA256(), ecdsa_deterministic=True)


def answer_to(data: bytes, source: Source) -> bytes | None:
    """The answer to a question of STUN by who wants to connect; None if it is no such question."""
    try:
        question = stun.parse_message(data)
        user, _, _ = question.attributes.get("USERNAME", "").partition(":")
        password = user.encode()  # by the specification they are the same
        if question.message_class != stun.Class.REQUEST or not user.startswith(_VERSIONS):
            return None
        if not question.check_message_integrity(password):
            return None
        answer = stun.Message(
            question.message_method, stun.Class.RESPONSE, question.transaction_id, {"XOR-MAPPED-ADDRESS": source}
        )
        answer.add_message_integrity(password)
        return bytes(answer)
    except (ValueError, struct.error):
        return None


class Cookies:
    """Takes the first words of DTLS, and keeps nothing of who says them.

    A hello with a post-quantum key comes in two datagrams. OpenSSL's `DTLSv1_listen` refuses pieces. So the cookie,
    which stands in the first one, is looked at here. Behind it OpenSSL is shown a hello of ours: it asks for a cookie,
    which nobody is sent. Then it waits for the hello with one, in as many pieces as it has.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        context = self._context = SSL.Context(SSL.DTLS_METHOD)
        context.set_max_proto_version(0xFEFD)  # DTLS 1.2; 1.3 has other cookies
        context.set_options(SSL.OP_NO_TICKET | (SSL.OP_COOKIE_EXCHANGE or 0))
        context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, lambda *_: True)  # Noise proves it
        context.set_cipher_list(b"ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-CHACHA20-POLY1305")
        context.set_cookie_generate_callback(lambda _: b"unsent")
        context.set_cookie_verify_callback(lambda *_: True)  # it was looked at here
        context.use_certificate(certificate)
        context.use_privatekey(key)
        self._secret = os.urandom(32)

    def take(self, data: bytes, source: Source) -> tuple[SSL.Connection | None, bytes]:
        """The connection of who has shown its cookie, if it has, and what is to be sent."""
        shown = _cookie_in(data)
        if shown is None:
            return None, b""
        cookie = hmac.digest(self._secret, repr(source).encode(), "sha256")
        if not hmac.compare_digest(shown, cookie):
            words = b"\xfe\xff" + bytes([len(cookie)]) + cookie
            size = len(words).to_bytes(3, "big")
            asking = b"\x03" + size + bytes(5) + size + words
            return None, b"\x16\xfe\xff" + data[3:11] + len(asking).to_bytes(2, "big") + asking
        ssl = SSL.Connection(self._context)
        ssl.set_accept_state()
        ssl.set_ciphertext_mtu(WEBRTC.packet)
        ssl.bio_write(_HELLO)
        with suppress(SSL.WantReadError):
            ssl.do_handshake()
        ssl.bio_read(WEBRTC.datagram)
        ssl.bio_write(data)
        return ssl, b""


def _cookie_in(data: bytes) -> bytes | None:
    """The cookie of a ClientHello whose beginning this is, b"" where there is none yet; None if it is something else.

    RFC 6347, section 4.2.2: behind 13 bytes of a record and 12 of a message, a version, 32 random bytes, a session.
    """
    if len(data) < 62 or data[0] != 0x16 or data[13] != 1 or any(data[19:22]):
        return None
    place = 60 + data[59]
    if place >= len(data):
        return None
    cookie = data[place + 1 : place + 1 + data[place]]
    return cookie if len(cookie) == data[place] else None


class WebRtcListener(IListener):
    """A socket for datagrams, and the connections on it."""

    background_nursery: trio.Nursery  # the swarm's, which it sets

    def __init__(self, handler: THandler, transport: WebRtc) -> None:
        self._handler, self._transport = handler, transport
        self.limits, self.bandwidth, self.fingerprint = transport.limits, transport.bandwidth, transport.fingerprint
        self._cookies = transport.cookies
        self._strangers = ShareCount(WEBRTC.strangers, seconds=WEBRTC.strangers_period)
        self._places = ShareCount(WEBRTC.connections, LIMITS.least_of_address)
        self._connections: dict[Source, WebRtcConnection] = {}
        # Who has a connection with an earlier run of this node. While STUN is answered, browsers do not give it up.
        self._orphans: dict[Source, None] = {}
        self._socket: socket.socket | None = None

    async def listen(self, maddr: Multiaddr) -> None:
        """
        Raises:
            OpenConnectionError: it cannot listen there.
        """
        family, port = port_of(maddr)
        made = socket.socket(family, socket.SOCK_DGRAM)
        try:
            made.setblocking(False)
            made.bind((host_of(maddr), port))
        except OSError as error:
            made.close()
            raise OpenConnectionError(f"cannot listen on {maddr}: {error}") from error
        self._socket = made
        self.background_nursery.start_soon(self._serve, made)

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        if self._socket is None:
            return ()
        host, port = self._socket.getsockname()[:2]
        family = "ip6" if self._socket.family == socket.AF_INET6 else "ip4"
        return (self._transport.with_certificate(Multiaddr(f"/{family}/{host}/udp/{port}/webrtc-direct")),)

    async def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                await trio.lowlevel.wait_readable(listening)
            except (trio.ClosedResourceError, OSError):
                return
            for _ in range(WEBRTC.at_once):
                try:
                    data, address = listening.recvfrom(WEBRTC.datagram)
                except BlockingIOError:
                    break
                except OSError:
                    continue  # what an earlier datagram of ours met
                try:
                    self._take(data, (address[0], address[1]))
                except Exception:  # it would take the host along
                    log.exception("a datagram was not understood")

    def _take(self, data: bytes, source: Source) -> None:
        connection = self._connections.get(source)
        if connection is not None:
            connection.deliver(data)
            return
        use = self.limits.of_address(origin_of_ip(source[0]))
        if len(data) < 13 or not use.is_quiet:
            return
        if not self._strangers.add(_network_of(source[0]), now=trio.current_time()):
            return  # it will be sent again; who forges addresses seldom has those of many networks
        begun = time.thread_time()
        if data[0] > 3 and data[3:5] != b"\0\0":  # an epoch of DTLS in which keys are agreed on
            self._orphans[source] = None
            while len(self._orphans) > WEBRTC.connections:
                del self._orphans[next(iter(self._orphans))]
        elif data[0] > 3:
            self._orphans.pop(source, None)
            ssl, out = self._cookies.take(data, source)
            if out:
                self.send(out, source)
            if ssl is not None:
                self._welcome(ssl, source)
        elif source not in self._orphans:
            self.answer(data, source)
        self.limits.worked(use, (time.thread_time() - begun) * WORK.units_of_second)

    def _welcome(self, ssl: SSL.Connection, source: Source) -> None:
        origin = origin_of_ip(source[0])
        if self._places.has_room(origin) and self.limits.admit(origin):
            self._places.add(origin)
            connection = self._connections[source] = WebRtcConnection(ssl, source, self)
            self.background_nursery.start_soon(self._handler, connection)

    def answer(self, data: bytes, source: Source) -> bool:
        if not data or data[0] > 3:
            return False
        answer = answer_to(data, source)
        if answer is not None:
            self.send(answer, source)
        return True

    def send(self, data: bytes, source: Source) -> None:
        if self._socket is not None:
            try:
                self._socket.sendto(data, source)
            except OSError as error:  # it is as good as lost on the way
                if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
                    log.debug("nothing can be sent to %s: %s", source, error)

    def forget(self, source: Source, connection: WebRtcConnection) -> None:
        if self._connections.get(source) is connection:
            del self._connections[source]
            self._places.remove(connection.origin)

    async def close(self) -> None:
        made, self._socket = self._socket, None
        if made is not None:
            trio.lowlevel.notify_closing(made)
            made.close()


def _network_of(host: str) -> str:
    """The /16 that an IPv4 address is in, or the /32 of an IPv6 one."""
    return origin_of_ip(host, 32) if ":" in host else ".".join(host.split(".")[:2])


class WebRtc(ITransport):
    """libp2p's transport for addresses with /webrtc-direct: it only listens."""

    def __init__(self, seed: bytes, limits: NodeLimits, bandwidth: Bandwidth) -> None:
        key, certificate = certificate_of(seed)
        self.limits, self.bandwidth = limits, bandwidth
        self.fingerprint = certificate.fingerprint(SHA256())
        self.cookies = Cookies(key, certificate)

    def create_listener(self, handler_function: THandler) -> WebRtcListener:
        return WebRtcListener(handler_function, self)

    def can_listen(self, maddr: Multiaddr) -> bool:
        return is_webrtc(maddr)

    def can_dial(self, maddr: Multiaddr) -> bool:
        return False

    async def dial(self, maddr: Multiaddr) -> Any:
        raise OpenConnectionError("by WebRTC others connect to this node, and not the other way round")

    def protocols(self) -> list[str]:
        return ["webrtc-direct"]

    def with_certificate(self, addr: Multiaddr) -> Multiaddr:
        """An address of this node; of WebRTC, with the fingerprint by which a browser knows whom it talks to."""
        if not is_webrtc(addr) or "certhash" in {protocol.name for protocol in addr.protocols()}:
            return addr
        hashed = b"\x12\x20" + self.fingerprint  # a multihash of SHA-256
        return Multiaddr(f"{addr}/certhash/u{base64.urlsafe_b64encode(hashed).decode().rstrip('=')}")
