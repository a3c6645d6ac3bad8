"""Which addresses of a peer to try, in which order, and how long one that failed is left alone: pure decisions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from typing import Final

from multiaddr import Multiaddr

from ..addresses import circuit_of, ip_of, is_circuit, is_public

Networks = Sequence[IPv4Network | IPv6Network]

_NEXT_AFTER: Final = 0.15  # seconds until the next address of a peer is tried beside those before it
_CIRCUITS_AFTER: Final = 0.3  # seconds of a start that direct addresses have
_FIRST_PAUSE: Final = 5.0  # seconds after one failure; each further one doubles it
_LONGEST_PAUSE: Final = 300.0
_HALF_LIFE: Final = 600.0  # seconds after which half of the failures are forgotten
_MAX_DIRECT: Final = 16  # addresses kept of one peer
_MAX_CIRCUITS: Final = 8


@dataclass(frozen=True)
class Trouble:
    """An address that has failed: how often (it fades with time), and when for the last time (seconds)."""

    failures: float
    at: float


@dataclass(frozen=True)
class Attempt:
    """An address to try `after` so many seconds, or sooner, once all before it have failed."""

    addr: Multiaddr
    after: float


def failed(trouble: Trouble | None, now: float) -> Trouble:
    """What to remember of an address that has just failed."""
    if trouble is None:
        return Trouble(1.0, now)
    return Trouble(trouble.failures * 0.5 ** ((now - trouble.at) / _HALF_LIFE) + 1.0, now)


def pause_ends(trouble: Trouble) -> float:
    """Until when the address is only tried if there is nothing else."""
    doublings = min(trouble.failures - 1.0, 16.0)
    return trouble.at + min(_FIRST_PAUSE * math.exp2(doublings), _LONGEST_PAUSE)


def kept(addrs: Iterable[Multiaddr]) -> tuple[Multiaddr, ...]:
    """What to remember of a peer's addresses, the first being the best known: neither kind crowds out the other."""
    unique = list(dict.fromkeys(addrs))
    direct = [addr for addr in unique if not is_circuit(addr)][:_MAX_DIRECT]
    circuits = [addr for addr in unique if is_circuit(addr)][:_MAX_CIRCUITS]
    return (*direct, *circuits)


def one_per_relay(addrs: Sequence[Multiaddr], troubles: Mapping[Multiaddr, Trouble]) -> list[Multiaddr]:
    """Without the circuit addresses that lead through a relay already among them: whoever dials one of them takes all
    ways to that relay. Of each relay, one that has failed stays only if all have."""
    chosen: dict[str, Multiaddr] = {}
    for addr in addrs:
        circuit = circuit_of(addr)
        name = str(addr) if circuit is None else circuit.relay_id
        if name not in chosen or (chosen[name] in troubles and addr not in troubles):
            chosen[name] = addr
    return list(chosen.values())


def plan(
    addrs: Sequence[Multiaddr], networks: Networks, troubles: Mapping[Multiaddr, Trouble], now: float
) -> tuple[list[Attempt], list[Attempt]]:
    """The attempts to make, and those to make only when all of them have failed.

    Direct addresses come one shortly after the other: those of our own `networks` first, then public ones, then
    those of foreign private networks, which mostly lead nowhere from here. Circuits start soon beside them, however
    many there are. Addresses that failed lately come last.
    """
    paused = [addr for addr in addrs if addr in troubles and pause_ends(troubles[addr]) > now]
    fresh = [addr for addr in addrs if addr not in paused]
    paused.sort(key=lambda addr: troubles[addr].failures)
    first, last = _attempts(sorted(fresh, key=lambda addr: _nearness(addr, networks))), _attempts(paused)
    return (first, last) if first else (last, [])


def _attempts(addrs: Sequence[Multiaddr]) -> list[Attempt]:
    direct = [addr for addr in addrs if not is_circuit(addr)]
    circuits = [addr for addr in addrs if is_circuit(addr)]
    start = _CIRCUITS_AFTER if direct else 0.0
    attempts = [Attempt(addr, turn * _NEXT_AFTER) for turn, addr in enumerate(direct)]
    attempts += [Attempt(addr, start + turn * _NEXT_AFTER) for turn, addr in enumerate(circuits)]
    return sorted(attempts, key=lambda attempt: attempt.after)


def _nearness(addr: Multiaddr, networks: Networks) -> int:
    host = ip_of(addr)
    if host is None or is_public(addr):
        return 1
    return 0 if any(host in network for network in networks) else 2
