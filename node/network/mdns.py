"""Nodes of the same local network, found by multicast DNS with no configuration and no internet.

As in the libp2p specification (discovery/mdns.md), a node is a service instance with a random name. Its TXT record
holds its addresses, `dnsaddr=/ip4/../tcp/../p2p/..` each. The service has its own name: we do not call on every libp2p
node of an office. That of a private swarm ends in some digits of its key's hash. The library, zeroconf, lives in
threads of its own: trio waits for them in worker threads, and receives names by a bounded queue.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio
from multiaddr import Multiaddr

from ...crypto.canonical import digest
from ..errors import BadInput
from .addresses import concrete, ip_of, is_circuit, is_webrtc, own_networks, parse_peer, port_of

if TYPE_CHECKING:
    from zeroconf import ServiceInfo

    from .host import Host

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MdnsPolicy:
    """How often a node looks around, and what it takes from strangers nearby."""

    tick: float = 10.0  # seconds between two looks at this machine's addresses
    retry: float = 30.0  # seconds until it is tried again where it did not work
    read: float = 2.0  # seconds for the record of one name
    readers: int = 4  # names looked up side by side
    max_names: int = 64  # waiting to be looked up
    max_addrs: int = 8  # announced, and taken from one record
    max_text: int = 255  # bytes of one string in a TXT record
    closing: float = 2.0


MDNS: Final = MdnsPolicy()

_APART: Final = b"swarm=named"
"""In the record of a node that was told its swarm: who is in another one has no business with it."""

Found = Callable[[str, Sequence[str], bool], None]


def service_name(psk: str | None) -> str:
    """The DNS name under which the nodes of one swarm are found: the public one, or the private one of this key."""
    secret = "" if psk is None else "-" + digest("petalnode/mdns/1", bytes.fromhex(psk)).hex()[:5]
    return f"_petalnode{secret}._udp.local."


def announceable(addrs: Iterable[str]) -> list[str]:
    """Of a node's addresses those that its neighbours can dial: of the networks that this machine is in itself."""
    networks = own_networks()
    found = []
    for addr in map(Multiaddr, addrs):
        host = None if is_circuit(addr) or is_webrtc(addr) else ip_of(addr)
        if host is not None and not host.is_loopback and any(host in network for network in networks):
            found.append(str(addr))
    return found[: MDNS.max_addrs]


def txt_record(addrs: Sequence[str], apart: bool = False) -> bytes:
    """The TXT record of a node with these addresses, /p2p included. `apart`: it was told its swarm."""
    texts = [*([_APART] if apart else []), *(f"dnsaddr={addr}".encode() for addr in addrs)]
    return b"".join(bytes([len(text)]) + text for text in texts if len(text) <= MDNS.max_text)


def read_txt(record: bytes) -> dict[str, list[str]]:
    """The peers in a TXT record: peer id -> addresses without /p2p. What is of no use is left out."""
    peers: dict[str, list[str]] = {}
    for text in _texts(record):
        if sum(map(len, peers.values())) >= MDNS.max_addrs:
            break
        key, _, value = text.partition(b"=")
        if key.lower() != b"dnsaddr":
            continue
        try:
            peer_id, addr = parse_peer(value.decode())
        except (BadInput, UnicodeDecodeError):
            continue
        host = ip_of(Multiaddr(addr))
        if host is not None and not host.is_loopback:
            peers.setdefault(peer_id, []).append(addr)
    return peers


def is_apart(record: bytes) -> bool:
    """Whether the node of this TXT record was told its swarm."""
    return any(text.lower() == _APART for text in _texts(record))


def _texts(record: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(record):
        end = start + 1 + record[start]
        yield record[start + 1 : end]
        start = end


def _interfaces() -> list[str]:
    """This machine's IPv4 addresses, which multicast is sent and received through."""
    hosts = [ip_of(addr) for addr in concrete([Multiaddr("/ip4/0.0.0.0/tcp/1")])]
    return [str(host) for host in hosts if host is not None and not host.is_loopback]


class _Radio:
    """zeroconf, for worker threads: every method blocks. What it hears goes to `names`.

    Raises:
        OSError: this machine lets nobody multicast.
    """

    def __init__(self, interfaces: list[str], service: str, apart: bool, names: _Names) -> None:
        # Takes a tenth of a second, which only those who need it shall pay, and not on trio's thread.
        from zeroconf import IPVersion, ServiceBrowser, ServiceStateChange, Zeroconf

        # It logs every interface that is down, and every malformed packet.
        logging.getLogger("zeroconf").setLevel(logging.CRITICAL)
        self._service = service
        self._apart = apart
        self._info: ServiceInfo | None = None
        self._zeroconf = Zeroconf(interfaces=interfaces, ip_version=IPVersion.V4Only)

        def on_change(name: str, state_change: ServiceStateChange, **_: Any) -> None:
            if state_change is not ServiceStateChange.Removed:
                names.put(name)

        try:
            ServiceBrowser(self._zeroconf, service, handlers=[on_change])
        except BaseException:
            self._zeroconf.close()
            raise

    def announce(self, addrs: Sequence[str]) -> None:
        """Tells the neighbours of these addresses, or of none any more."""
        from zeroconf import ServiceInfo

        before, self._info = self._info, None
        if before is not None:
            self._zeroconf.unregister_service(before)
        if not addrs:
            return
        name = secrets.token_hex(16)
        hosts = [ip_of(Multiaddr(addr)) for addr in addrs]
        self._info = ServiceInfo(
            self._service,
            f"{name}.{self._service}",
            port=port_of(Multiaddr(addrs[0]))[1],
            properties=txt_record(addrs, self._apart),
            server=f"{name}.local.",
            addresses=[host.packed for host in hosts if host is not None],
        )
        # The name is random: nobody has to be asked whether it is free.
        self._zeroconf.register_service(self._info, cooperating_responders=True)

    def read(self, name: str) -> bytes:
        """The TXT record of an instance of the service; empty if there is none."""
        info = self._zeroconf.get_service_info(self._service, name, timeout=int(MDNS.read * 1000))
        return b"" if info is None else info.text or b""

    def close(self) -> None:
        self._zeroconf.close()


async def run_mdns(service: str, host: Host, found: Found, asked: trio.Event, apart: bool = False) -> None:
    """Looks for nodes of the local network, and announces its addresses there, until cancelled.

    `apart`: this node was told its swarm. `found` is called for each neighbour that appears or changes, this node
    included. It gets the peer id, the addresses (without /p2p), and whether that one was told its swarm. `asked` is set
    once neighbours are asked, or cannot be. Follows changes of the addresses. Where multicast is refused, it tries
    again now and then, and says so in the debug log only: a node does without it.
    """
    while True:
        interfaces: list[str] = []
        try:
            if interfaces := _interfaces():
                async with _open(interfaces, service, apart) as (radio, names):
                    asked.set()
                    await _use(radio, names, interfaces, host, found)
                continue  # the interfaces have changed
        except Exception as error:  # zeroconf's own kinds, and the system's
            log.debug("no mDNS on %s: %r", ", ".join(interfaces), error)
        asked.set()
        await trio.sleep(MDNS.retry)


class _Names:
    """Names of instances on their way from zeroconf's thread to ours. Bounded: a flood drops the oldest."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque(maxlen=MDNS.max_names)
        self._token = trio.lowlevel.current_trio_token()
        self._some = trio.Event()

    def put(self, name: str) -> None:
        """For any thread."""
        self._waiting.append(name)
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._wake, idempotent=True)

    def _wake(self) -> None:
        self._some.set()

    async def take(self) -> set[str]:
        """Those that wait, at least one."""
        while not self._waiting:
            await self._some.wait()
            self._some = trio.Event()
        names = set(self._waiting)
        self._waiting.clear()
        return names


@contextlib.asynccontextmanager
async def _open(interfaces: list[str], service: str, apart: bool) -> AsyncIterator[tuple[_Radio, _Names]]:
    names = _Names()
    # Not left behind half open: it takes some ten milliseconds, and its threads would have no owner.
    with trio.CancelScope(shield=True):
        radio = await trio.to_thread.run_sync(_Radio, interfaces, service, apart, names)
    try:
        yield radio, names
    finally:
        with trio.CancelScope(deadline=trio.current_time() + MDNS.closing, shield=True):
            await trio.to_thread.run_sync(radio.close, abandon_on_cancel=True)


async def _use(radio: _Radio, names: _Names, interfaces: list[str], host: Host, found: Found) -> None:
    """Announces and listens until the interfaces change."""
    limiter = trio.CapacityLimiter(MDNS.readers)

    async def look_up(name: str) -> None:
        try:
            record = await trio.to_thread.run_sync(radio.read, name, abandon_on_cancel=True, limiter=limiter)
        except Exception as error:
            log.debug("cannot read the mDNS record of %s: %r", name, error)
            return
        apart = is_apart(record)
        for peer_id, where in read_txt(record).items():
            if near := announceable(where):  # a neighbour is on this network, and nowhere else
                found(peer_id, near, apart)

    async def listen() -> None:
        while True:
            async with trio.open_nursery() as readers:
                for name in await names.take():
                    readers.start_soon(look_up, name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        announced: list[str] = []
        while _interfaces() == interfaces:
            current = announceable(host.addrs())
            if current != announced:
                await trio.to_thread.run_sync(partial(radio.announce, current), abandon_on_cancel=True)
                announced = current
            await trio.sleep(MDNS.tick)
        nursery.cancel_scope.cancel()
