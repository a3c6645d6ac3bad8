"""Punching through NATs: makes a direct connection to a peer that is connected through a relay (DCUtR).

Both sides dial each other at the same time, from the ports that they listen on. Each one's first packet opens its
own NAT for the other's. Which side is the client of the connection is given by who started, not by whose packet
got through (https://github.com/libp2p/specs/blob/master/relay/DCUtR.md).

Pure functions decide when to try it, and at which addresses.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from ....protocols.delimited import DelimitedStream
from ....protocols.framing import PeerError
from ....protocols.nat_traversal import PUNCH, exchange_first, exchange_second, give_sign
from ..addresses import Endpoint
from ..host import Host
from ..shares import backoff
from ..transport.raw_connection import Path
from ..transport.stream_bytes import StreamBytes
from .autonat import identified, observed_by
from .reachability import LocalEndpoints, NatNode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PunchPolicy:
    """How two peers behind NATs try to connect, and how often."""

    window: float = 1.5  # seconds in which a connection must come about: two packets of TCP's opening
    handshakes: float = 3.0  # seconds for what follows
    plain_dial: float = 2.0  # seconds, side by side with the agreement
    max_plain: int = 8  # addresses that a peer says it listens on
    message: float = 5.0  # seconds for one message through the relay
    longest_half: float = 1.0  # seconds of half a round trip at most
    view_lasts: float = 20.0  # seconds for which the address that a relay observed is used
    max_views: int = 16
    at_once: int = 8  # punches side by side each way, so that packets to unknown hosts stay few
    whole: float = 30.0  # seconds for all of a punch: a peer that answers late holds a place no longer
    max_records: int = 1000
    retired_after: float = 10.0  # seconds without streams until a relayed connection beside a direct one is closed
    look: float = 2.0
    attempts: int = 3  # one after the other, as the standard has it
    first_pause: float = 60.0  # seconds until a peer is tried again after all attempts failed; doubles endpoint time
    longest_pause: float = 3600.0
    max_targets: int = 8
    again: float = 0.1  # seconds until a refused try is repeated: the other side's NAT may have opened meanwhile


PUNCHING: Final = PunchPolicy()


Ports = dict[int, int]  # by version of IP


@dataclass(frozen=True)
class PunchRecord:
    """How it went with one peer: failures in a row, when the last one was (seconds), and what was the case then.

    `case` is whatever the outcome depends on: our own addresses, and the peer's.
    """

    failures: int
    at: float
    case: frozenset[str]


def may_punch(record: PunchRecord | None, case: frozenset[str], now: float) -> bool:
    """Whether a try is worth it: not again where it has failed, for a time that grows, unless the case is new."""
    return record is None or bool(case - record.case) or now >= record.at + pause_after(record)


def pause_after(record: PunchRecord | None) -> float:
    """Seconds from the last failure until the next try, if the case stays the same."""
    failures = record.failures if record is not None else 1
    return backoff(failures, PUNCHING.first_pause, PUNCHING.longest_pause)


def after_failure(record: PunchRecord | None, case: frozenset[str], now: float) -> PunchRecord:
    """What to remember when all attempts have failed."""
    known = record is not None and not case - record.case
    return PunchRecord(record.failures + 1 if record is not None and known else 1, now, case)


def own_endpoints(
    observed: Sequence[Endpoint], local: LocalEndpoints, reached: Iterable[Endpoint], port: dict[int, int]
) -> tuple[Endpoint, ...]:
    """Where the other side should dial us.

    `observed` are the endpoints from which peers see us come, the latest first. Most NATs keep a port. So we expect to
    come from the same address, and from the port that we dial from (`port`). `reached` are those where others got
    through; our own addresses are for neighbours.
    """
    predicted = [Endpoint(seen.ip, port[seen.ip.version]) for seen in observed if seen.ip.version in port]
    listening = [Endpoint(own.ip, port[own.ip.version]) for own in local.listening if own.ip.version in port]
    found = [
        endpoint
        for endpoint in (*reached, *predicted, *listening)
        if endpoint.can_be_dialed and not endpoint.ip.is_loopback
    ]
    return tuple(dict.fromkeys(found))[: PUNCHING.max_targets]


def targets(theirs: Iterable[Endpoint | None], local: LocalEndpoints, port: dict[int, int]) -> dict[str, Endpoint]:
    """Which of the other side's endpoints may be dialed, by their multiaddrs: not ourselves, which homes with equal
    addresses would lead to."""
    ours = {Endpoint(ip, own) for ip in local.own_ips for own in (*port.values(), *local.ports(ip.version))}
    return {
        endpoint.multiaddr: endpoint
        for endpoint in theirs
        if endpoint is not None and endpoint.can_be_dialed and endpoint not in ours and endpoint.ip.version in port
    }


def dialed_of(targets: Mapping[str, Endpoint], permitted: Collection[str]) -> tuple[Endpoint, ...]:
    """The first few of these endpoints whose multiaddrs are among the permitted ones."""
    return tuple(targets[addr] for addr in targets if addr in permitted)[: PUNCHING.max_targets]


class HolePuncher:
    """Upgrades relayed connections of `node` for as long as `nursery` runs."""

    def __init__(self, host: Host, nursery: trio.Nursery, node: NatNode) -> None:
        self._host = host
        self._nursery = nursery
        self._node = node
        self._limit = trio.CapacityLimiter(PUNCHING.at_once)
        self._upgrading: dict[str, trio.Event] = {}
        self._starting: set[str] = set()
        self._serving: set[str] = set()
        self._retiring: set[str] = set()
        self._records: dict[str, PunchRecord] = {}
        self.punched: set[str] = set()  # peers to which our NATs are open, or were
        self._views: dict[str, tuple[float, Endpoint]] = {}  # relay -> when, and where it saw us come from
        host.set_stream_handler(PUNCH, self._serve)
        host.on_connected(self._on_connected)
        host.on_lost(self.punched.discard)

    def moved(self) -> None:
        """The own addresses have changed: what relays saw, and where we failed, is of the past."""
        self._views.clear()
        self._records.clear()

    def _on_connected(self, peer_id: str, path: Path) -> None:
        self._nursery.start_soon(self._follow, peer_id, path)

    async def _follow(self, peer_id: str, path: Path) -> None:
        """What a new connection calls for. An error of ours must not take the node down."""
        try:
            if path.direct:
                await self._retire_relayed(peer_id)
            elif path.inbound:
                await self._upgrade(peer_id)
            else:
                await self._view(path.relay)  # soon the other side will ask
        except Exception:
            log.exception("punching failed")

    # --- where we are

    async def _view(self, relay: str | None) -> None:
        """Asks a relay where it sees us come from, unless that is known."""
        if (
            relay is None
            or trio.current_time() - self._views.get(relay, (-PUNCHING.view_lasts,))[0] < PUNCHING.view_lasts
        ):
            return
        with contextlib.suppress(PeerError, ConnectionError):
            seen = await observed_by(self._host, relay, timeout=PUNCHING.message)
            if seen is not None:
                self._views.pop(relay, None)
                self._views[relay] = (trio.current_time(), seen)
                while len(self._views) > PUNCHING.max_views:
                    del self._views[next(iter(self._views))]

    def _own_addrs(self, ports: Ports) -> list[str]:
        observed = [seen for _, seen in sorted(self._views.values(), key=lambda view: -view[0])]
        own = own_endpoints(observed, self._node.local, self._node.reached, ports)
        return [endpoint.multiaddr for endpoint in own]

    def _targets(self, peer_id: str, answer: Sequence[str], ports: Ports) -> tuple[Endpoint, ...]:
        """Those of a peer that are dialed: as all that peers say of themselves, they have to be permitted."""
        found = targets(map(Endpoint.parse, answer), self._node.local, ports)
        return dialed_of(found, self._host.permitted(peer_id, list(found)))

    @contextlib.asynccontextmanager
    async def _ports(self) -> AsyncIterator[Ports]:
        """The ports to dial from, for the length of the block."""
        async with contextlib.AsyncExitStack() as held:
            ports: Ports = {}
            for version in (4, 6):
                listening = self._node.local.ports(version)
                with contextlib.suppress(OSError):
                    port = own_port(version, listening[0] if listening else None)
                    ports[version] = await held.enter_async_context(port)
            yield ports

    # --- the side that starts: who accepted the relayed connection

    async def _upgrade(self, peer_id: str) -> None:
        """Tries until there is a direct connection or none at all: at once, and then in longer and longer pauses."""
        if peer_id in self._upgrading:
            self._upgrading[peer_id].set()  # a new connection, a new try
            return
        try:
            while not self._host.is_direct(peer_id) and self._host.is_connected(peer_id):
                self._upgrading[peer_id] = again = trio.Event()
                await self._try(peer_id)
                with trio.move_on_after(pause_after(self._records.get(peer_id))):
                    await again.wait()
        finally:
            self._upgrading.pop(peer_id, None)

    async def _try(self, peer_id: str) -> None:
        self._starting.add(peer_id)
        try:
            async with self._limit:
                with trio.move_on_after(PUNCHING.whole):
                    await self._start(peer_id)
        finally:
            self._starting.discard(peer_id)

    async def _start(self, peer_id: str) -> None:
        for path in self._host.paths(peer_id)[:1]:
            await self._view(path.relay)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._dial_plainly, peer_id)
            try:  # in here: what passes a nursery is wrapped in a group
                await self._punch(peer_id)
            except (PeerError, OSError) as error:
                log.debug("cannot punch through to %s: %s", peer_id, error)
            if self._host.is_direct(peer_id):
                nursery.cancel_scope.cancel()

    async def _dial_plainly(self, peer_id: str) -> None:
        """The peer may be public, or of our own network."""
        with trio.move_on_after(PUNCHING.plain_dial), contextlib.suppress(PeerError, ConnectionError):
            addrs = (await identified(self._host, peer_id, timeout=PUNCHING.message, direct=False)).addrs
            self._host.learn(peer_id, [addr for addr in addrs if Endpoint.parse(addr)][: PUNCHING.max_plain])
            await self._host.connect(peer_id, direct=True)

    async def _punch(self, peer_id: str) -> None:
        async with self._ports() as ports:
            for _ in range(PUNCHING.attempts):
                if self._host.is_direct(peer_id) or not self._host.is_connected(peer_id):
                    return
                stream = DelimitedStream(await self._host.open_stream(peer_id, PUNCH), peer_id)
                try:
                    own = self._own_addrs(ports)
                    answer, rtt = await exchange_first(stream, own, timeout=PUNCHING.message)
                    theirs = self._targets(peer_id, answer, ports)
                    case = frozenset(addr.split("/")[2] for addr in own) | {str(endpoint.ip) for endpoint in theirs}
                    if not theirs or not may_punch(self._records.get(peer_id), case, _now()):
                        return
                    await give_sign(stream, timeout=PUNCHING.message)
                    await trio.sleep(min(rtt / 2, PUNCHING.longest_half))
                finally:
                    await stream.close()
                await self._dial(peer_id, theirs, ports, initiator=False)
                if self._host.is_direct(peer_id):
                    log.info("punched through to %s", peer_id)
                    self._records.pop(peer_id, None)
                    return
            log.info("no way to punch through to %s", peer_id)
            self._records[peer_id] = after_failure(self._records.pop(peer_id, None), case, _now())
            while len(self._records) > PUNCHING.max_records:
                del self._records[next(iter(self._records))]

    # --- the other side: who dialed through the relay

    async def _serve(self, raw: StreamBytes, peer_id: str) -> None:
        stream = DelimitedStream(raw, peer_id)
        if raw.path.direct or not self._may_serve(peer_id):
            await stream.close()
            return
        self._serving.add(peer_id)
        try:
            with trio.move_on_after(PUNCHING.whole):
                await self._answer(stream, raw.path.relay)
        except (PeerError, OSError) as error:
            log.debug("no punching with %s: %s", peer_id, error)
        finally:
            self._serving.discard(peer_id)
            await stream.close()

    def _may_serve(self, peer_id: str) -> bool:
        """Whether this peer may start now: one that accepted a connection of ours through a relay, once at a time.

        Others could take all places, and make us dial.
        """
        # If both accepted a relayed connection of the other, both start; the lower peer id's start counts.
        ours_counts = peer_id in self._starting and self._host.peer_id < peer_id
        if ours_counts or self._host.is_direct(peer_id) or peer_id in self._serving:
            return False
        return len(self._serving) < PUNCHING.at_once and any(not path.inbound for path in self._host.paths(peer_id))

    async def _answer(self, stream: DelimitedStream, relay: str | None) -> None:
        peer_id = stream.peer_id
        await self._view(relay)
        async with self._ports() as ports:
            answer = await exchange_second(stream, self._own_addrs(ports), timeout=PUNCHING.message)
            theirs = self._targets(peer_id, answer, ports)
            with self._host.punching(peer_id, [target.multiaddr for target in theirs]):
                await self._dial(peer_id, theirs, ports, initiator=True)

    # --- both

    async def _dial(self, peer_id: str, theirs: Sequence[Endpoint], ports: Ports, *, initiator: bool) -> None:
        """Dials all endpoints side by side. The initiator's first success ends its other tries.

        The other side leaves that choice to the initiator. Two that choose on their own may each close what the
        other one chose.
        """
        window = trio.current_time() + PUNCHING.window
        self.punched.add(peer_id)

        async def dial(target: Endpoint) -> None:
            with trio.CancelScope(deadline=window), contextlib.suppress(OSError):
                nursery.start_soon(agree, await dial_from(ports[target.ip.version], target), target)

        async def agree(stream: trio.SocketStream, target: Endpoint) -> None:
            try:
                with trio.fail_after(PUNCHING.handshakes):
                    await self._host.adopt(stream, peer_id=peer_id, initiator=initiator, addr=target.multiaddr)
            except (OSError, trio.TooSlowError) as error:
                log.debug("no direct connection to %s at %s: %s", peer_id, target, error)
            else:
                if initiator:
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for target in theirs:
                if self._host.take_dial(peer_id, target.multiaddr):
                    nursery.start_soon(dial, target)

    async def _retire_relayed(self, peer_id: str) -> None:
        """Closes what runs through relays once a direct connection has taken its local."""
        if peer_id in self._retiring:
            return
        self._retiring.add(peer_id)
        quiet_since = _now()
        try:
            while any(not path.direct for path in self._host.paths(peer_id)):
                await trio.sleep(PUNCHING.look)
                if self._host.relayed_streams(peer_id) or not self._host.is_direct(peer_id):
                    quiet_since = _now()
                elif _now() - quiet_since >= PUNCHING.retired_after:
                    await self._host.close_path(peer_id, relayed_only=True)
        finally:
            self._retiring.discard(peer_id)


def _now() -> float:
    return trio.current_time()


# --- sockets that dial from a given port: a NAT maps one port of a machine to one outside


# Several sockets, the listening one among them, may then have one port. Windows has the first only.
_SHARED: Final = (socket.SO_REUSEADDR, *([socket.SO_REUSEPORT] if hasattr(socket, "SO_REUSEPORT") else []))
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

    If the other side dials us simultaneously from there, both become one connection (RFC 9293, section 3.5).

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
        await trio.sleep(PUNCHING.again)


def _share(made: trio.socket.SocketType) -> None:
    for option in _SHARED:
        made.setsockopt(socket.SOL_SOCKET, option, 1)


def _family(version: int) -> socket.AddressFamily:
    return socket.AF_INET6 if version == 6 else socket.AF_INET


def _any(version: int) -> str:
    return "::" if version == 6 else "0.0.0.0"
