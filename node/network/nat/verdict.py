"""Whether others reach this node, judged from what its peers have seen: pure functions.

Nothing here asks whether an address is private by its range: a network may use any range, and what counts is who
gets through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Network, IPv6Network
from typing import Final

from .endpoint import Endpoint, IPAddress

_OBSERVERS: Final = 3  # peers of one family whose word we want
_REFRESH: Final = 600.0  # seconds after which a peer is asked again
_RETRY: Final = 30.0  # seconds after which one is asked again that could not say anything
_STALE: Final = 1500.0  # seconds after which what a peer said no longer counts
_MAX_CANDIDATES: Final = 8  # addresses that one peer is asked to dial


@dataclass(frozen=True)
class Place:
    """Where this node is: the addresses of its interfaces, the networks they are in, and what it listens on."""

    listening: tuple[Endpoint, ...]
    own_ips: frozenset[IPAddress]
    networks: tuple[IPv4Network | IPv6Network, ...]

    def ports(self, version: int) -> tuple[int, ...]:
        """The ports listened on for other machines, of one version of IP."""
        found = (each.port for each in self.listening if each.ip.version == version and not each.ip.is_loopback)
        return tuple(dict.fromkeys(found))

    @property
    def is_local(self) -> bool:
        """Whether this node listens for others of this machine only."""
        return bool(self.listening) and all(each.ip.is_loopback for each in self.listening)


class DialBack(Enum):
    """What became of a peer's trying to dial us."""

    REACHED = "reached"
    FAILED = "failed"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Sighting:
    """What one peer could say of us: where it saw us come from, and whether it reached us when it dialed.

    `observer_ip` is where we see the peer itself; `at` in seconds.
    """

    observer: str
    observer_ip: IPAddress
    seen: Endpoint | None
    dial_back: DialBack
    reached: Endpoint | None
    at: float


class Standing(Enum):
    """What is known about one version of IP."""

    UNKNOWN = "nobody could say"
    OPEN = "others reach us"
    CLOSED = "others do not reach us"


@dataclass(frozen=True)
class Verdict:
    """The judgement for one version of IP.

    `reached` are the endpoints at which others got through, the surest first; that may be even where most do not.
    `translated` says that others see us under an address that is not ours; `outside` that somebody from beyond our
    own networks has had a say.
    """

    standing: Standing = Standing.UNKNOWN
    reached: tuple[Endpoint, ...] = ()
    translated: bool = False
    outside: bool = False


NO_VERDICT: Final = Verdict()


def carried_over(held: Verdict, new: Verdict, *, settling: bool) -> Verdict:
    """The verdict to go by: while all is being asked anew, one that says nothing does not replace one that did."""
    if settling and new.standing is Standing.UNKNOWN:
        return Verdict(held.standing, (), held.translated, held.outside)
    return new


def judge(version: int, sightings: Iterable[Sighting], place: Place, now: float) -> Verdict:
    """Judges IP `version` (4 or 6).

    A peer of our own networks that reaches us proves nothing about others: it has a say only while nobody from
    outside has one. Those who see us under the same address are one public, which reaches us or does not; a single
    one of them that is wrong, or lies, is outvoted by the others. To see us under a foreign address and to get
    through nowhere proves a NAT. If one public does not reach us, we are closed, whatever others do: a private
    network of friends is not the internet.
    """
    if not place.ports(version):
        return NO_VERDICT
    relevant = [each for each in sightings if each.observer_ip.version == version and now - each.at < _STALE]
    outsiders = [each for each in relevant if _is_outside(each, place)]
    publics: dict[IPAddress, list[Sighting]] = {}
    for each in outsiders or relevant:
        if each.seen is not None:
            publics.setdefault(each.seen.ip, []).append(each)
    standings = {ip: _standing(said, translated=ip not in place.own_ips) for ip, said in publics.items()}
    reached = Counter(
        each.reached for ip, said in publics.items() if standings[ip] is Standing.OPEN for each in said if each.reached
    )
    found = set(standings.values())
    return Verdict(
        standing=next((each for each in (Standing.CLOSED, Standing.OPEN) if each in found), Standing.UNKNOWN),
        reached=tuple(endpoint for endpoint, _ in reached.most_common()),
        translated=any(ip not in place.own_ips for ip in publics),
        outside=bool(outsiders),
    )


def _standing(said: Sequence[Sighting], *, translated: bool) -> Standing:
    """What those say who see us under one address."""
    reached = sum(each.dial_back is DialBack.REACHED for each in said)
    failed = sum(each.dial_back is DialBack.FAILED for each in said)
    if reached and reached >= failed:
        return Standing.OPEN
    return Standing.CLOSED if failed or translated else Standing.UNKNOWN


def _is_foreign(sighting: Sighting, place: Place) -> bool:
    return sighting.seen is not None and sighting.seen.ip not in place.own_ips


def _is_outside(sighting: Sighting, place: Place) -> bool:
    return _is_foreign(sighting, place) or not any(sighting.observer_ip in network for network in place.networks)


def candidates(seen: Endpoint | None, place: Place, extra: Collection[Endpoint]) -> tuple[Endpoint, ...]:
    """What to ask a peer to dial that sees us at `seen`: it may try no other IP address than that one.

    `extra` are endpoints that somebody has mapped or named for us; beyond those, our ports are guessed to be open
    on the address that the peer sees.
    """
    if seen is None:
        return ()
    named = [endpoint for endpoint in (*extra, *place.listening) if endpoint.ip == seen.ip]
    guessed = [Endpoint(seen.ip, port) for port in place.ports(seen.ip.version)]
    mapped = [Endpoint(seen.ip, endpoint.port) for endpoint in extra if endpoint.ip.version == seen.ip.version]
    return tuple(dict.fromkeys([*named, *guessed, *mapped]))[:_MAX_CANDIDATES]


@dataclass(frozen=True)
class Observer:
    """A peer that could be asked: we have a direct connection to it, and see it at `ip`."""

    peer_id: str
    ip: IPAddress


def whom_to_ask(
    observers: Sequence[Observer],
    sightings: Mapping[str, Sighting],
    asked: Mapping[str, float],
    place: Place,
    now: float,
) -> tuple[str, ...]:
    """Whom to ask about ourselves now: a few peers of each version of IP, those from outside our networks first.

    `sightings` and `asked` (when, in seconds) are by peer id.
    """
    ask: list[str] = []
    for version in (4, 6):
        if not place.ports(version):
            continue
        family = [each for each in observers if each.ip.version == version]
        family.sort(key=lambda each: any(each.ip in network for network in place.networks))
        silent = [each for each in family if not _says_something(sightings.get(each.peer_id), now)]
        missing = _OBSERVERS - (len(family) - len(silent))
        due = [each.peer_id for each in silent if now - asked.get(each.peer_id, -_RETRY) >= _RETRY]
        ask += due[: max(missing, 0)]
    return tuple(ask)


def _says_something(sighting: Sighting | None, now: float) -> bool:
    return sighting is not None and sighting.dial_back is not DialBack.NOT_TRIED and now - sighting.at < _REFRESH
