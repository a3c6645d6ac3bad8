"""Whether other nodes reach this node, from what its peers have observed, and which addresses it then announces.

Pure functions. Nothing here asks whether an address is private by its range. A network may use any range, and what
counts is who gets through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import IPv4Network, IPv6Network
from math import inf
from typing import Final, Literal, Protocol, get_args

from ..addresses import Endpoint, IPAddress
from ..shares import backoff, origin_of_ip


@dataclass(frozen=True)
class NatPolicy:
    """Whom a node asks to be reachable, how often, and how long that counts. Times are in seconds."""

    observers: int = 3  # peers of one family to ask how they see us
    refresh: float = 600.0  # after which one is asked again
    retry: float = 30.0  # after which one is asked again that could not say anything
    first_retry: float = 2.0  # after which one is that did not answer at all; then in longer pauses
    stale: float = 1500.0  # after which what a peer said no longer counts
    identify: float = 5.0  # for what a peer says of itself
    max_kept: int = 64  # peers whose observation is kept, and from whom observers are chosen
    look_around: float = 1.0  # between two looks at the own interfaces
    breath: float = 0.2  # between two looks for peers to ask, when many come at once
    settling: float = 20.0  # for the answers after a change
    wanted: int = 2  # reservations
    ask_nodes: int = 4  # peers asked side by side whether they relay
    ask_pause: float = 5.0  # between two rounds of that
    ask_again: float = 15.0  # after which a peer is asked that again
    offer_lasts: float = 600.0
    answer: float = 4.0  # for what a relay, or who may be one, says itself
    by_relay: float = 8.0  # for its answer to a connection, for which it has to ask the peer, and for handshakes there
    max_pending: int = 128  # peers that relays bring us, not yet done with that; of one address, half


NAT: Final = NatPolicy()


@dataclass(frozen=True)
class RelayCandidate:
    """A relay to choose from. Those of a lower `rank` are preferred."""

    peer_id: str
    rank: int


class NatNode(Protocol):
    """The node that is to be reachable, as what makes it reachable knows it; `NatManager` is one."""

    @property
    def local(self) -> LocalEndpoints:
        """Where it is."""

    @property
    def reached(self) -> Sequence[Endpoint]:
        """Where others got through to it."""

    def observers(self) -> Sequence[str]:
        """The peers to ask where they see it, in the order of trust."""

    def autonat_of(self, peer_id: str, protocols: Sequence[str]) -> str | None:
        """By which version of AutoNAT a peer that speaks these protocols is asked to dial it; None: by none."""

    def extra_endpoints(self) -> Sequence[Endpoint]:
        """Those that were named by a person, or mapped by a router."""

    def relay_candidates(self) -> Sequence[RelayCandidate]:
        """The relays to choose from."""

    def addrs_of(self, relay_id: str) -> Sequence[str]:
        """The multiaddrs of a relay."""

    def update(self) -> None:
        """What is known of it may have changed."""

    def moved(self) -> None:
        """Its own addresses have changed."""


@dataclass(frozen=True)
class LocalEndpoints:
    """Where this node is: the addresses of its interfaces, the networks they are in, and what it listens on."""

    listening: tuple[Endpoint, ...]
    own_ips: frozenset[IPAddress]
    networks: tuple[IPv4Network | IPv6Network, ...]

    def ports(self, version: int) -> tuple[int, ...]:
        """The ports listened on for other machines, of one version of IP."""
        found = (
            endpoint.port
            for endpoint in self.listening
            if endpoint.ip.version == version and not endpoint.ip.is_loopback
        )
        return tuple(dict.fromkeys(found))

    @property
    def is_local(self) -> bool:
        """Whether this node listens for others of this machine only."""
        return bool(self.listening) and all(endpoint.ip.is_loopback for endpoint in self.listening)


class DialBack(Enum):
    """What became of a peer's trying to dial us."""

    REACHED = "reached"
    FAILED = "failed"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Observation:
    """What one peer could say of us: where it saw us come from, and whether it reached us when it dialed.

    `observer_ip` is where we see the peer itself; `at` in seconds. `doubtful`: the first failure, of a peer perhaps
    that was busy; it counts, but is soon tried again.
    """

    observer: str
    observer_ip: IPAddress
    seen: Endpoint | None
    dial_back: DialBack
    reached: Endpoint | None
    at: float
    doubtful: bool = False


class NatStatus(Enum):
    """What is known about one version of IP."""

    UNKNOWN = "nobody could say"
    OPEN = "others reach us"
    CLOSED = "others do not reach us"


@dataclass(frozen=True)
class IpVerdict:
    """The judgement for one version of IP.

    `reached` are the endpoints at which others got through, the surest first; that may be even where most do not.
    `translated` says that others see us under an address that is not ours; `outside` that somebody from beyond our
    own networks has had a say.
    """

    status: NatStatus = NatStatus.UNKNOWN
    reached: tuple[Endpoint, ...] = ()
    translated: bool = False
    outside: bool = False


NO_VERDICT: Final = IpVerdict()


def carried_over(held: IpVerdict, new: IpVerdict, *, settling: bool) -> IpVerdict:
    """The verdict to go by: while all is being asked anew, one that says nothing does not replace one that did."""
    if settling and new.status is NatStatus.UNKNOWN:
        return IpVerdict(held.status, (), held.translated, held.outside)
    return new


def judge(version: int, observations: Iterable[Observation], local: LocalEndpoints, now: float) -> IpVerdict:
    """Judges IP `version` (4 or 6).

    A peer of our own networks that reaches us proves nothing about others. It has a say only while nobody from
    outside has one. Those who see us under the same address are one public, which reaches us or does not. A single
    one of them that is wrong, or lies, is outvoted by the others. To see us under a foreign address and to get
    through nowhere proves a NAT. If one public does not reach us, we are closed, whatever others do. A private
    network of friends is not the internet.

    One observer alone may invent a public address, and name somebody else's as where it reached us. Where others
    contradict it, that address is not ours to announce, and we are closed. A lie costs a place at a relay.
    """
    if not local.ports(version):
        return NO_VERDICT
    relevant = [
        observation
        for observation in observations
        if observation.observer_ip.version == version and counts(observation, now)
    ]
    outsiders = [observation for observation in relevant if _is_outside(observation, local)]
    publics: dict[IPAddress, list[Observation]] = {}
    for observation in outsiders or relevant:
        if observation.seen is not None:
            publics.setdefault(observation.seen.ip, []).append(observation)
    statuses = {
        ip: _status_of(said, translated=ip not in local.own_ips)
        if ip in local.own_ips or len(publics) == 1 or _is_confirmed(said)
        else NatStatus.CLOSED
        for ip, said in publics.items()
    }
    reached = Counter(
        observation.reached
        for ip, said in publics.items()
        if statuses[ip] is NatStatus.OPEN
        for observation in said
        if observation.reached
    )
    found = set(statuses.values())
    return IpVerdict(
        status=next((status for status in (NatStatus.CLOSED, NatStatus.OPEN) if status in found), NatStatus.UNKNOWN),
        reached=tuple(endpoint for endpoint, _ in reached.most_common()),
        translated=any(ip not in local.own_ips for ip in publics),
        outside=bool(outsiders),
    )


def counts(observation: Observation, now: float) -> bool:
    """Whether it is not too old."""
    return now - observation.at < NAT.stale


def _status_of(said: Sequence[Observation], *, translated: bool) -> NatStatus:
    """What those say who see us under one address."""
    reached = sum(observation.dial_back is DialBack.REACHED for observation in said)
    failed = sum(observation.dial_back is DialBack.FAILED for observation in said)
    if reached and reached >= failed:
        return NatStatus.OPEN
    return NatStatus.CLOSED if failed or translated else NatStatus.UNKNOWN


def _is_confirmed(said: Sequence[Observation]) -> bool:
    return len({origin_of_ip(str(observation.observer_ip)) for observation in said}) > 1


def _is_outside(observation: Observation, local: LocalEndpoints) -> bool:
    is_foreign = observation.seen is not None and observation.seen.ip not in local.own_ips
    return is_foreign or not any(observation.observer_ip in network for network in local.networks)


def candidates(seen: Endpoint | None, local: LocalEndpoints, extra: Collection[Endpoint]) -> tuple[Endpoint, ...]:
    """What to ask a peer to dial that sees us at `seen`. It may try no other IP address than that one.

    `extra` are endpoints that somebody has mapped or named for us. Beyond those, our ports are guessed to be open
    on the address that the peer sees.
    """
    if seen is None:
        return ()
    named = [endpoint for endpoint in (*extra, *local.listening) if endpoint.ip == seen.ip]
    guessed = [Endpoint(seen.ip, port) for port in local.ports(seen.ip.version)]
    mapped = [Endpoint(seen.ip, endpoint.port) for endpoint in extra if endpoint.ip.version == seen.ip.version]
    return tuple(dict.fromkeys([*named, *guessed, *mapped]))


@dataclass(frozen=True)
class Observer:
    """A peer that could be asked: we have a direct connection to it, and see it at `ip`."""

    peer_id: str
    ip: IPAddress


def whom_to_ask(
    observers: Sequence[Observer],
    observations: Mapping[str, Observation],
    asked: Mapping[str, float],
    local: LocalEndpoints,
    now: float,
) -> tuple[str, ...]:
    """Whom to ask about ourselves now: a few peers of each version of IP, those from outside our networks first.

    Where peers see us under different addresses, each view should have its witnesses, so more are asked.
    `observations` and `asked` (when, in seconds) are by peer id.
    """
    ask: list[str] = []
    for version in (4, 6):
        if not local.ports(version):
            continue
        family = [observer for observer in observers if observer.ip.version == version]
        family.sort(key=lambda observer: any(observer.ip in network for network in local.networks))
        silent = [observer for observer in family if not _says_something(observations.get(observer.peer_id), now)]
        views = {said.seen.ip for said in observations.values() if said.seen and said.seen.ip.version == version}
        missing = NAT.observers * max(1, min(len(views), NAT.observers)) - (len(family) - len(silent))
        due = [observer.peer_id for observer in silent if now - asked.get(observer.peer_id, -inf) >= NAT.retry]
        ask += due[: max(missing, 0)]
    return tuple(ask)


def counts_as_asked(now: float, failures: int) -> float:
    """When a peer counts as asked that has not answered now, for `failures` times in a row. A question that was lost on
    its way must not keep a node out of reach for long."""
    return now - NAT.retry + backoff(failures, NAT.first_retry, NAT.retry)


def _says_something(observation: Observation | None, now: float) -> bool:
    if observation is None or observation.dial_back is DialBack.NOT_TRIED:
        return False
    return now - observation.at < (NAT.retry if observation.doubtful else NAT.refresh)


# --- what follows from the verdicts


Kind = Literal["unknown", "public", "upnp", "relayed", "unreachable"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True)
class Reachability:
    """`relays` are peer ids; `text` is one line for a person."""

    kind: Kind
    relays: tuple[str, ...]
    text: str


NOBODY_ASKED = Reachability("unknown", (), "reachability not known yet: no other node has tried to dial this one")


@dataclass(frozen=True)
class ReachabilityInputs:
    """All that reachability depends on.

    `named` are the endpoints that the operator announces, `mapped` those that a router has opened for us. `circuits`
    are the circuit addresses by relay with a reservation of ours. `relays_allowed` is false if none are to be used, and
    `relays_known` counts those that could be.
    """

    local: LocalEndpoints
    ip4: IpVerdict = NO_VERDICT
    ip6: IpVerdict = NO_VERDICT
    named: tuple[Endpoint, ...] = ()
    mapped: tuple[Endpoint, ...] = ()
    circuits: dict[str, tuple[str, ...]] = field(default_factory=dict)
    relays_allowed: bool = True
    relays_known: int = 0

    @property
    def reached(self) -> tuple[Endpoint, ...]:
        """Where others got through."""
        return (*self.ip4.reached, *self.ip6.reached)


def needs_relays(inputs: ReachabilityInputs) -> bool:
    """Whether some can reach this node only through a relay: those who speak IPv4 count, as everybody does."""
    if inputs.ip4.status is NatStatus.UNKNOWN:
        return inputs.ip6.status is NatStatus.CLOSED
    return inputs.ip4.status is NatStatus.CLOSED


def is_public(inputs: ReachabilityInputs) -> bool:
    """Whether everybody can be expected to reach this node."""
    statuses = (inputs.ip4.status, inputs.ip6.status)
    return NatStatus.OPEN in statuses and not needs_relays(inputs)


def extra_addrs(inputs: ReachabilityInputs) -> tuple[str, ...]:
    """The multiaddrs to announce beside those of the interfaces: where others got through, then the circuits.

    Those of the interfaces are announced even if nobody outside gets through there: neighbours do.
    """
    own = set(inputs.local.listening)
    direct = [endpoint.multiaddr for endpoint in inputs.reached if endpoint not in own]
    circuits = [addr for addrs in inputs.circuits.values() for addr in addrs] if needs_relays(inputs) else []
    return tuple(dict.fromkeys([*direct, *circuits]))


def reachability(inputs: ReachabilityInputs) -> Reachability:
    """The reachability, as a kind and as a line for a person."""
    reached = inputs.reached
    if not inputs.local.listening:
        return Reachability("unknown", (), "this node does not listen: it dials others, and nobody dials it")
    if inputs.local.is_local:
        return Reachability("unknown", (), "reachable on this machine only, where it listens")
    if needs_relays(inputs):
        return _without_direct_way(inputs, reached)
    if not reached:
        return NOBODY_ASKED
    where = _enumerated([str(endpoint) for endpoint in reached])
    if reached[0] in inputs.mapped:
        return Reachability("upnp", (), f"mapped by UPnP at {where}")
    if not (inputs.ip4.outside or inputs.ip6.outside or reached[0].ip.is_global):
        return Reachability("public", (), f"reachable at {where}, as far as nodes of its own network can tell")
    forwarded = reached[0] not in inputs.local.listening
    return Reachability("public", (), f"public at {where}{' (forwarded by a router)' if forwarded else ''}")


def _without_direct_way(inputs: ReachabilityInputs, reached: Sequence[Endpoint]) -> Reachability:
    closed = inputs.ip4 if inputs.ip4.status is NatStatus.CLOSED else inputs.ip6
    behind = "behind NAT" if closed.translated else "behind a firewall"
    how = "public over IPv6 at" if all(endpoint.ip.version == 6 for endpoint in reached) else "some reach it at"
    but = f"{how} {_enumerated([str(endpoint) for endpoint in reached])}, else " if reached else ""
    relays = tuple(inputs.circuits)
    if relays:
        through = _enumerated([short(relay) for relay in relays])
        return Reachability(
            "relayed", relays, f"{but}{behind}, reachable through relay{'s' if len(relays) > 1 else ''} {through}"
        )
    if not inputs.relays_allowed:
        why = "relays are off (--relay)"
    elif inputs.relays_known:
        why = (
            f"none of {inputs.relays_known} relays has taken it yet"
            if inputs.relays_known > 1
            else ("the relay has not taken it yet")
        )
    else:
        why = "no relay is known; join by a public peer (--peer), or forward the port"
    return Reachability("unreachable", (), f"{but}{'not reachable: ' if not but else ''}{behind}, and {why}")


def short(peer_id: str) -> str:
    """A peer id as a person tells it from others."""
    return f"…{peer_id[-8:]}"


def _enumerated(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
