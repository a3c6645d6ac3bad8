"""Nodes of go-libp2p for the tests of how others get on with petalnode's: the daemon p2pd, of the wheel of hivemind.

It is told what to do on a socket, in messages of protobuf
(https://github.com/learning-at-home/go-libp2p-daemon/blob/master/pb/p2pd.proto).
"""

from __future__ import annotations

import hashlib
import io
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from multiaddr import Multiaddr

from petalnode.crypto.identity import any_peer_id_from_bytes, any_peer_id_to_bytes
from tests.interop.built import BUILT
from tests.swarm.processes import LOOPBACK, Running, environment

REQUESTS: Final = {"connect": (1, 2), "open": (2, 3), "dht": (4, 5), "connections": (5, 0), "pubsub": (8, 8)}
"""Their types, and the fields with what they are about."""
FIND_PROVIDERS, PROVIDE, SUBSCRIBE = 2, 8, 3
Fields = list[tuple[int, int | bytes]]


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """Protobuf's bytes of fields, by their numbers."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def read_varint(file: BinaryIO) -> int:
    """-1 at the end."""
    number = shift = 0
    while byte := file.read(1):
        number |= (byte[0] & 127) << shift
        shift += 7
        if byte[0] < 128:
            return number
    return -1


def read_message(file: BinaryIO) -> Fields:
    """The next message, behind its length."""
    data, found = io.BytesIO(file.read(read_varint(file))), Fields()
    while (tag := read_varint(data)) >= 0:
        value = read_varint(data)
        found.append((tag >> 3, data.read(value) if tag & 7 else value))
    return found


def within(data: object) -> dict[int, object]:
    """The fields of a message that is a field."""
    assert isinstance(data, bytes)
    return dict(read_message(io.BytesIO(varint(len(data)) + data)))


def text_of(data: object) -> str:
    assert isinstance(data, bytes)
    return any_peer_id_from_bytes(data)


def cid(name: str) -> bytes:
    """Of which the multihash is Kademlia's key."""
    return b"\x01\x55\x12\x20" + hashlib.sha256(name.encode()).digest()


PUBLIC: Final = ("-forceReachabilityPublic", "-autonat")
"""For who is to relay, dial back and punch holes."""


class GoNode(Running):
    """It serves Kademlia's table and has gossipsub. `flags` are p2pd's."""

    def __init__(self, home: Path, listen: str, flags: Sequence[str], prefix: Sequence[str]) -> None:
        self._folder = tempfile.mkdtemp(prefix="p2pd")  # of a name that is short enough for sockets
        where = ["-listen", f"/unix{self._folder}/control", "-hostAddrs", listen]
        super().__init__([*prefix, str(BUILT / "p2pd"), *where, "-dhtServer", "-pubsub", *flags], environment(home))
        self._address = ""

    @property
    def address(self) -> str:
        """With its peer id; waits for it the first time."""
        if not self._address:
            said = list(iter(self.line, "Peer Addrs:"))
            (peer_id,) = (line.removeprefix("Peer ID: ") for line in said if line.startswith("Peer ID: "))
            self._address = f"{self.line()}/p2p/{peer_id}"
        return self._address

    @property
    def peer_id(self) -> str:
        return self.address.rpartition("/")[2]

    def kill(self) -> None:
        super().kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _told(self, request: str, *fields: tuple[int, int | bytes]) -> Iterator[tuple[BinaryIO, Fields]]:
        """The answer to a request, and the socket, on which more may follow.

        Raises:
            ConnectionError: the answer is an error.
        """
        assert self.address
        kind, place = REQUESTS[request]
        asked = message((1, kind), *([(place, message(*fields))] if place else []))
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(120)
            control.connect(f"{self._folder}/control")
            control.sendall(varint(len(asked)) + asked)
            with control.makefile("rwb") as file:
                answer = read_message(file)
                if (said := dict(answer)).get(1, -1):
                    raise ConnectionError(str(within(said[2])[1]) if 2 in said else "no answer")
                yield file, answer

    def connect(self, addr: str) -> bool:
        """Whether it got through."""
        at, _, peer = addr.rpartition("/p2p/")
        try:
            with self._told("connect", (1, any_peer_id_to_bytes(peer)), (2, Multiaddr(at).to_bytes())):
                return True
        except ConnectionError:
            return False

    def paths(self, peer: str) -> list[dict[str, str]]:
        """The connections to a peer, in the words of peer.mjs."""
        with self._told("connections") as (_, answer):
            found = [within(said) for number, said in answer if number == 6]
        return [{"addr": str(Multiaddr(one[2]))} for one in found if text_of(one[1]) == peer]

    @contextmanager
    def open(self, peer: str, protocol: str) -> Iterator[BinaryIO]:
        """A stream to a peer, to write to and `flush`, and to read from."""
        with self._told("open", (1, any_peer_id_to_bytes(peer)), (2, protocol.encode())) as (file, _):
            yield file

    def provide(self, name: str) -> bool:
        """Leaves a record of itself at the peers of Kademlia that it knows; whether it knows any."""
        try:
            with self._told("dht", (1, PROVIDE), (3, cid(name))):
                return True
        except ConnectionError:
            return False

    def providers(self, name: str) -> set[str]:
        """The peer ids of those that Kademlia names."""
        found = set()
        with self._told("dht", (1, FIND_PROVIDERS), (3, cid(name)), (6, 4)) as (file, _):
            while (said := dict(read_message(file))).get(1) == 1:
                found.add(text_of(within(said[2])[1]))
        return found

    @contextmanager
    def subscribed(self, topic: str) -> Iterator[Iterator[bytes]]:
        """The messages of a topic of gossipsub, as they come."""
        with self._told("pubsub", (1, SUBSCRIBE), (2, topic.encode())) as (file, _):
            yield (data for said in iter(lambda: read_message(file), []) if isinstance(data := dict(said)[2], bytes))


class GoNodes:
    """Starts them, and ends all of them."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._started: list[GoNode] = []

    def key(self) -> tuple[str, str]:
        """The flag for an ECDSA key, which js-libp2p makes none of (libp2p's peer-ids/peer-ids.md)."""
        made = ec.generate_private_key(ec.SECP256R1())
        data = made.private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        file = self._home / f"key-{len(self._started)}"
        file.write_bytes(message((1, 3), (2, data)))
        return "-id", str(file)

    def start(
        self, listen: str = LOOPBACK, *flags: str, peers: Sequence[str] = (), prefix: Sequence[str] = ()
    ) -> GoNode:
        """Returns at once; its `address` waits. It dials `peers` at the start."""
        join = ("-b", "-bootstrapPeers", ",".join(peers)) if peers else ()
        self._started.append(GoNode(self._home, listen, (*flags, *join), prefix))
        return self._started[-1]

    def end(self) -> None:
        for node in self._started:
            node.kill()
