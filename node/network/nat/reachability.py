"""How others reach this node, and the addresses that it announces because of it: pure functions of what is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .endpoint import Endpoint
from .verdict import NO_VERDICT, Place, Standing, Verdict

Kind = Literal["unknown", "public", "upnp", "relayed", "unreachable"]


@dataclass(frozen=True)
class Reachability:
    """`relays` are peer ids; `text` is one line for a person."""

    kind: Kind
    relays: tuple[str, ...]
    text: str


NOBODY_ASKED = Reachability("unknown", (), "reachability not known yet: no other node has tried to dial this one")


@dataclass(frozen=True)
class Situation:
    """All that reachability depends on.

    `named` are the endpoints that a person has told us to announce, `mapped` those that a router has opened for us;
    `circuits` the addresses of each relay that holds a place for us, by its peer id; `relays_allowed` is false if
    none are to be used; `relays_known` counts those that could be.
    """

    place: Place
    ip4: Verdict = NO_VERDICT
    ip6: Verdict = NO_VERDICT
    named: tuple[Endpoint, ...] = ()
    mapped: tuple[Endpoint, ...] = ()
    circuits: dict[str, tuple[str, ...]] = field(default_factory=dict)
    relays_allowed: bool = True
    relays_known: int = 0

    @property
    def reached(self) -> tuple[Endpoint, ...]:
        """Where others got through."""
        return (*self.ip4.reached, *self.ip6.reached)


def needs_relays(situation: Situation) -> bool:
    """Whether some can reach this node only through a relay: those who speak IPv4 count, as everybody does."""
    if situation.ip4.standing is Standing.UNKNOWN:
        return situation.ip6.standing is Standing.CLOSED
    return situation.ip4.standing is Standing.CLOSED


def is_public(situation: Situation) -> bool:
    """Whether everybody can be expected to reach this node."""
    standings = (situation.ip4.standing, situation.ip6.standing)
    return Standing.OPEN in standings and not needs_relays(situation)


def extra_addrs(situation: Situation) -> tuple[str, ...]:
    """The multiaddrs to announce beside those of the interfaces: where others got through, then the circuits.

    Those of the interfaces are announced even if nobody outside gets through there: neighbours do.
    """
    own = set(situation.place.listening)
    direct = [endpoint.multiaddr for endpoint in situation.reached if endpoint not in own]
    circuits = [addr for addrs in situation.circuits.values() for addr in addrs] if needs_relays(situation) else []
    return tuple(dict.fromkeys([*direct, *circuits]))


def reachability(situation: Situation) -> Reachability:
    """The state of things, in a word and in a line."""
    reached = situation.reached
    if not situation.place.listening:
        return Reachability("unknown", (), "this node does not listen: it dials others, and nobody dials it")
    if situation.place.is_local:
        return Reachability("unknown", (), "reachable on this machine only, where it listens")
    if needs_relays(situation):
        return _without_direct_way(situation, reached)
    if not reached:
        return NOBODY_ASKED
    where = _enumerated([str(endpoint) for endpoint in reached])
    if reached[0] in situation.mapped:
        return Reachability("upnp", (), f"mapped by UPnP at {where}")
    if not (situation.ip4.outside or situation.ip6.outside or reached[0].ip.is_global):
        return Reachability("public", (), f"reachable at {where}, as far as nodes of its own network can tell")
    forwarded = reached[0] not in situation.place.listening
    return Reachability("public", (), f"public at {where}{' (forwarded by a router)' if forwarded else ''}")


def _without_direct_way(situation: Situation, reached: Sequence[Endpoint]) -> Reachability:
    closed = situation.ip4 if situation.ip4.standing is Standing.CLOSED else situation.ip6
    behind = "behind NAT" if closed.translated else "behind a firewall"
    how = "public over IPv6 at" if all(each.ip.version == 6 for each in reached) else "some reach it at"
    but = f"{how} {_enumerated([str(endpoint) for endpoint in reached])}, else " if reached else ""
    relays = tuple(situation.circuits)
    if relays:
        through = _enumerated([short(relay) for relay in relays])
        return Reachability(
            "relayed", relays, f"{but}{behind}, reachable through relay{'s' if len(relays) > 1 else ''} {through}"
        )
    if not situation.relays_allowed:
        why = "relays are off (--relay)"
    elif situation.relays_known:
        why = (
            f"none of {situation.relays_known} relays has taken it yet"
            if situation.relays_known > 1
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
