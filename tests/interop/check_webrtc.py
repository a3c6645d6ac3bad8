"""WebRTC-direct, with js-libp2p in Node and with the page of the JavaScript client in Chromium: `make interop`."""

from __future__ import annotations

import shutil
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
from aioice import stun
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from multiaddr import Multiaddr
from OpenSSL import SSL
from transformers import AutoTokenizer

from petalnode.crypto.identity import Identity
from petalnode.crypto.swarm_key import make_swarm_key
from petalnode.node.network.host import Host, open_host
from petalnode.node.network.transport.stream_bytes import StreamBytes
from petalnode.node.network.transport.webrtc.association import WEBRTC
from petalnode.node.network.transport.webrtc.listener import certificate_of
from tests.greedy import prompt
from tests.interop.built import BUILT, NODE
from tests.interop.check_browsers import PROGRAMS, Page
from tests.interop.check_client import Client, expected, options
from tests.nat.lab import Kind, open_lab, why_not
from tests.nat.nodes import ToldNode, lab_nodes
from tests.node_inspection import handshakes_of, limits_of
from tests.swarm.processes import Nodes, petalnode, until
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_models import save_tiny

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("built")]
LISTEN = "/ip4/127.0.0.1/udp/0/webrtc-direct"
SHARED = ("--share-weights", "on")
MUCH = 6 << 20  # bytes
FORBIDDEN = "--force-fieldtrials=WebRTC-NoSdpMangleUfrag/Enabled/"


@asynccontextmanager
async def listening() -> AsyncIterator[Host]:
    listen = [Multiaddr(LISTEN)]
    async with open_host(Identity.generate(), listen=listen, announce=[], psk=None) as host:
        host.set_stream_handler("/echo", echo)
        host.set_stream_handler("/stuck", stuck)
        yield host


async def echo(stream: StreamBytes, _: str) -> None:
    stream.grant()
    try:
        while data := await stream.read(1 << 16):
            await stream.write(data)
        await stream.close_write()
    except ConnectionError:
        await stream.reset()


async def stuck(stream: StreamBytes, _: str) -> None:
    await stream.wait_lost()


@contextmanager
def dialed(host: Host, home: Path, port: int | None = None) -> Iterator[ToldNode]:
    """A peer that dials the host, or who stands in its place at another port."""
    shutil.copy(Path(__file__).with_name("rtc.mjs"), BUILT)
    address = host.addrs()[0]
    if port is not None:
        address = address.replace(f"/udp/{port_of(host)}/", f"/udp/{port}/")
    node = ToldNode([NODE, str(BUILT / "rtc.mjs"), address], home)
    try:
        yield node
    finally:
        node.kill()


def port_of(host: Host) -> int:
    return int(Multiaddr(host.addrs()[0]).value_for_protocol("udp"))


async def moved(node: ToldNode, protocol: str, size: int | None) -> dict[str, Any]:
    ask = partial(node.ask, "move", protocol=protocol, size=size)
    return await trio.to_thread.run_sync(ask, abandon_on_cancel=True)


async def until_true(condition: Callable[[], bool]) -> None:
    with trio.fail_after(120):
        while not condition():  # noqa: ASYNC110  (what it waits for tells nobody)
            await trio.sleep(0.05)


async def test_bytes_come_back_as_they_went(tmp_path: Path) -> None:
    took: dict[int, list[float]] = {}
    async with listening() as host:
        with dialed(host, tmp_path) as node:
            for size in (0, 1, 70_000, *[8192] * 21, MUCH):
                begun = time.perf_counter()
                done = await moved(node, "/echo", size)
                took[size] = [*took.get(size, []), time.perf_counter() - begun]
                there, back = done["digests"]
                assert (done["sent"], done["back"], done["failed"], back) == (size, size, None, there)
    each, rate = 1000 * sorted(took[8192])[10], MUCH / took[MUCH][0] / 1e6
    print(f"8 KiB there and back, on a new stream: {each:.1f} ms; {rate:.1f} MB/s each way")


async def lossy(line: trio.socket.SocketType, port: int) -> None:
    """Hands datagrams of one peer on to a port, and back; of 20 one is lost, and another one overtaken by the next."""
    held: tuple[bytes, tuple[str, int]] | None = None
    peer = ("", 0)
    for number in count():
        data, source = await line.recvfrom(2048)
        if source[1] != port:
            peer = source
        to = peer if source[1] == port else ("127.0.0.1", port)
        if number % 20 == 7:
            continue
        if number % 20 == 13 and held is None:
            held = data, to
            continue
        for one in ((data, to), held):
            if one is not None:
                await line.sendto(*one)
        held = None


async def test_lost_and_late_datagrams_change_nothing(tmp_path: Path) -> None:
    async with listening() as host, trio.open_nursery() as nursery:
        with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as line:
            await line.bind(("127.0.0.1", 0))
            nursery.start_soon(lossy, line, port_of(host))
            with dialed(host, tmp_path, line.getsockname()[1]) as node:
                done = await moved(node, "/echo", 1 << 20)
                assert done["failed"] is None and done["back"] == 1 << 20 and len(set(done["digests"])) == 1
            nursery.cancel_scope.cancel()


async def test_an_endless_sender_costs_itself_one_stream(tmp_path: Path) -> None:
    """What nobody reads fills the window of its connection, and the stream is reset for the sake of the others."""
    async with listening() as host:
        with dialed(host, tmp_path / "one") as endless, dialed(host, tmp_path / "other") as other:
            flood = endless.tell("move", protocol="/stuck", size=None)
            await until_true(lambda: limits_of(host).unread > 250_000)
            beside = await moved(other, "/echo", 1 << 20)
            for _ in range(20):  # js-libp2p gives up a new stream that waits for what it had sent on the other one
                same = await moved(endless, "/echo", 1 << 16)
                if same["failed"] is None:
                    break
            assert (beside["back"], same["back"]) == (1 << 20, 1 << 16), same["failed"]
            ended = await trio.to_thread.run_sync(partial(endless.answer, flood), abandon_on_cancel=True)
            assert ended["failed"] is not None and ended["sent"] < 16 << 20
            assert limits_of(host).unread == 0


class Stranger:
    """Who begins to shake hands, from an address of its own."""

    def __init__(self, host: Host, address: str, alpn: Sequence[bytes] = ()) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((address, 0))
        self.socket.connect(("127.0.0.1", port_of(host)))
        self.socket.settimeout(5)
        context = SSL.Context(SSL.DTLS_METHOD)
        context.set_max_proto_version(0xFEFD)
        if alpn:
            context.set_alpn_protos(list(alpn))
        self.ssl = SSL.Connection(context)
        self.ssl.set_connect_state()

    def shake_hands(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> int:
        """DTLS to its end, each record in a datagram of its own; how many the first flight had."""
        self.ssl.use_certificate(certificate)
        self.ssl.use_privatekey(key)
        flights = []
        for _ in range(100):
            with suppress(SSL.WantReadError):
                self.ssl.do_handshake()
                break
            with suppress(SSL.WantReadError):
                flights.append([self.socket.send(record) for record in records_of(self.ssl.bio_read(1 << 16))])
            self.listen()
        assert self.ssl.get_cipher_name() is not None
        return len(flights[0])

    def speak(self) -> None:
        """The next words of DTLS."""
        with pytest.raises(SSL.WantReadError):
            self.ssl.do_handshake()
        self.socket.send(self.ssl.bio_read(1 << 16))

    def listen(self) -> bytes:
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return b""
        self.ssl.bio_write(data)
        return data


def records_of(flight: bytes) -> Iterator[bytes]:
    """The records of DTLS in what a side has to send, each with its header of 13 bytes."""
    while flight:
        size = 13 + int.from_bytes(flight[11:13], "big")
        yield flight[:size]
        flight = flight[size:]


def question(user: str, password: str) -> bytes:
    asked = stun.Message(stun.Method.BINDING, stun.Class.REQUEST, attributes={"USERNAME": f"{user}:them"})
    asked.add_message_integrity(password.encode())
    return bytes(asked)


async def test_a_hello_in_pieces_is_understood() -> None:
    """As browsers' with a post-quantum key, which is too large for one datagram."""
    async with listening() as host:
        long = Stranger(host, "127.0.0.2", [b"x" * 250] * 8)
        pieces = await trio.to_thread.run_sync(long.shake_hands, *certificate_of(bytes(32)))
        assert pieces > 1


async def test_half_open_handshakes_take_no_places(tmp_path: Path) -> None:
    async with listening() as host:
        strangers = [Stranger(host, f"127.0.0.{number}") for number in range(2, 42)]
        for stranger in strangers:
            stranger.speak()
        answers = [await trio.to_thread.run_sync(stranger.listen) for stranger in strangers]
        # A cookie, smaller than what asked for it; and nothing is kept of who has not shown it.
        assert all(13 < len(answer) < 100 for answer in answers) and handshakes_of(host) == 0
        shown = strangers[:20]
        await trio.sleep(WEBRTC.strangers_period)  # one network may not say more at once
        for stranger in shown:
            stranger.speak()
        await until_true(lambda: handshakes_of(host) == len(shown))
        for stranger in shown:  # what is no DTLS, and no handshake
            stranger.socket.send(b"\x17" * 100)
        with dialed(host, tmp_path) as node:
            assert (await moved(node, "/echo", 1000))["back"] == 1000
        await until_true(lambda: not handshakes_of(host))
        assert limits_of(host).connections <= 1


@pytest.mark.parametrize(
    ("data", "is_answered"),
    [
        (question("libp2p+webrtc+v1/" + "a" * 32, "libp2p+webrtc+v1/" + "a" * 32), True),
        (question("libp2p+webrtc+v2/" + "a" * 32, "libp2p+webrtc+v2/" + "a" * 32), True),
        (question("libp2p+webrtc+v3/" + "a" * 32, "libp2p+webrtc+v3/" + "a" * 32), False),
        (question("libp2p+webrtc+v1/" + "a" * 32, "another"), False),
        (b"", False),
        (b"\x00\x01\x00\x08" + b"\x21\x12\xa4\x42" + bytes(12) + struct.pack("!HHI", 0x8029, 2, 0), False),
        (b"\x16\xfe\xfd" + bytes(10), False),
        (bytes(1400), False),
    ],
)
async def test_only_questions_of_the_protocol_are_answered(data: bytes, is_answered: bool) -> None:
    async with listening() as host:
        stranger = Stranger(host, "127.0.0.2")
        stranger.socket.send(data)
        stranger.socket.settimeout(5 if is_answered else 0.3)
        assert bool(await trio.to_thread.run_sync(stranger.listen)) == is_answered
        assert handshakes_of(host) == 0


async def test_floods_of_one_network_leave_room_for_others() -> None:
    """As of somebody who forges addresses near his own."""
    asked = question("libp2p+webrtc+v1/a", "libp2p+webrtc+v1/a")
    async with listening() as host:
        flood = [Stranger(host, f"127.1.{number // 250}.{number % 250 + 1}") for number in range(150)]
        for stranger in (*flood, last := Stranger(host, "127.2.0.1")):
            stranger.socket.send(asked)
        assert await trio.to_thread.run_sync(last.listen)


@pytest.fixture
def folder(models: Path) -> Path:
    return models / "tiny-llama"


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_address_holds_when_the_server_is_restarted(node_starter: Nodes, folder: Path, tmp_path: Path) -> None:
    key, listen = str(tmp_path / "node.key"), f"/ip4/127.0.0.1/udp/{free_port()}/webrtc-direct"
    serve = ("0:6", "--listen", listen, "--identity", key, *SHARED)
    server = node_starter.server(folder, *serve)
    address = server.address
    assert f"{listen}/certhash/" in address
    ids = prompt(1, 9)
    given = {"peers": [address], "webrtc": True, "prompt": ids[0].tolist()}
    client = Client(node_starter, **given, options=options(24), wait=8)
    for _ in range(8):
        client.event("token")
    server.kill()
    again = node_starter.server(folder, *serve)
    assert again.address == address
    client.go_on()
    done = client.event("done")
    assert done["ids"] == expected(folder, ids, 24) and done["recoveries"] >= 1
    fresh = Client(node_starter, **given, options=options(4)).event("done")
    assert fresh["ids"] == expected(folder, ids, 4)


def test_what_cannot_be_listened_at_is_told(node_starter: Nodes, tmp_path: Path) -> None:
    key = tmp_path / "swarm.key"
    make_swarm_key(key)
    taken = LISTEN.replace("/0/", "/1234/")
    for listen, told in (
        ((LISTEN, "--swarm-key", str(key)), "no WebRTC in private swarms"),
        ((f"{LISTEN}/certhash/uEiAkH5a4DPGKUuOBjYw0CgwjvcJCJMD2K_1aluKR_tpevQ",), "the node adds"),
        ((LISTEN.replace("/0/", "/70000/"),), "is no port"),
        (
            (taken, "--listen", taken),
            "each transport needs its own",
        ),
    ):
        refused = petalnode("bootstrap", "--new-swarm", "--listen", *listen, env=node_starter.env)
        assert refused.code == 2 and told in refused.err and "Traceback" not in refused.err, refused


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("chromium", ()), ("chromium", (FORBIDDEN,)), ("firefox", ())],
    ids=["Chromium", "Chromium with the second version", "Firefox"],
)
def test_browsers_reach_servers_without_domain(tmp_path: Path, kind: str, arguments: Sequence[str]) -> None:
    """The second version is spoken where the browser forbids what the first one does."""
    if shutil.which(PROGRAMS[kind]) is None:
        pytest.skip(f"{PROGRAMS[kind]} is not installed")
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path / "tiny-llama"
    save_tokenizer(save_tiny("llama", folder, max_position_embeddings=4096, eos_token_id=None))
    with open_lab() as lab, lab_nodes(tmp_path / "machines") as nodes:
        listen = ("--listen", "/ip4/0.0.0.0/tcp/31330", "--listen", "/ip4/0.0.0.0/udp/31330/webrtc-direct")
        first = nodes.command(lab.host("one"), "serve", str(folder), "--new-swarm", *listen, "--blocks", "0:3", *SHARED)
        join = ("--peer", first.address)
        last = nodes.command(lab.host("two"), "serve", str(folder), *join, *listen, "--blocks", "3:6", *SHARED)
        assert last.ready
        address = next(addr for addr in first.ready["addrs"] if "webrtc-direct" in addr)
        page = Page(nodes, lab.nat("cafe", Kind.SYMMETRIC).host("laptop"), kind, arguments=arguments)
        page.open(address)
        page.generate("how does it go on", 40)
        until(lambda: bool(page.said("done") or page.said("failed")), "the end of the answer")
        page.tab.ask("picture", path=str(BUILT / f"webrtc-{kind}-{len(arguments)}.png"))
        assert page.said("failed") == "" and page.route() == [first.peer_id, last.peer_id]
        ways = page.run("[...document.querySelectorAll('#route td:last-child')].map(cell => cell.textContent)")
        assert set(ways) == {"direct"}
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("how does it go on", return_tensors="pt").input_ids
        assert page.text() == tokenizer.decode(expected(folder, ids, 40), skip_special_tokens=True)
        assert not [url for url in page.tab.ask("asked") if url.startswith("ws")]
