"""When to try to punch through to a peer, and at which addresses: pure decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ..addresses import Endpoint
from .reachability import LocalEndpoints

ATTEMPTS: Final = 3  # one after the other, as the standard has it
_FIRST_PAUSE: Final = 60.0  # seconds until a peer is tried again after all attempts failed; doubles endpoint time
_LONGEST_PAUSE: Final = 3600.0
_MAX_TARGETS: Final = 8


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
    return float(min(_FIRST_PAUSE * 2 ** min(failures - 1, 16), _LONGEST_PAUSE))


def after_failure(record: PunchRecord | None, case: frozenset[str], now: float) -> PunchRecord:
    """What to remember when all attempts have failed."""
    known = record is not None and not case - record.case
    return PunchRecord(record.failures + 1 if record is not None and known else 1, now, case)


def own_endpoints(
    observed: Sequence[Endpoint], local: LocalEndpoints, reached: Iterable[Endpoint], port: dict[int, int]
) -> tuple[Endpoint, ...]:
    """Where the other side should dial us.

    `observed` are the endpoints from which peers see us come, the latest first: most NATs keep a port, so we expect
    to come from the same address and from the port that we dial from, `port` by version of IP. `reached` are those
    where others got through; our own addresses are for neighbours.
    """
    predicted = [Endpoint(seen.ip, port[seen.ip.version]) for seen in observed if seen.ip.version in port]
    listening = [Endpoint(own.ip, port[own.ip.version]) for own in local.listening if own.ip.version in port]
    found = [
        endpoint
        for endpoint in (*reached, *predicted, *listening)
        if endpoint.can_be_dialed and not endpoint.ip.is_loopback
    ]
    return tuple(dict.fromkeys(found))[:_MAX_TARGETS]


def targets(theirs: Iterable[Endpoint | None], local: LocalEndpoints, port: dict[int, int]) -> tuple[Endpoint, ...]:
    """Which of the other side's endpoints to dial: not ourselves, which homes with equal addresses would lead to."""
    ours = {Endpoint(ip, own) for ip in local.own_ips for own in (*port.values(), *local.ports(ip.version))}
    found = [
        endpoint
        for endpoint in theirs
        if endpoint is not None and endpoint.can_be_dialed and endpoint not in ours and endpoint.ip.version in port
    ]
    return tuple(dict.fromkeys(found))[:_MAX_TARGETS]
