"""What the swarm of one model looks like to this node: who serves what, what is missing, what would help. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Literal

from ...protocols.announcement import Announcement, ServerState
from ...protocols.ids import Span
from ..client.session_adapter import announced
from ..swarm.routing import describe_blocks
from ..swarm.view import coverage_of
from ..trust.reputation import Ban

MAX_SERVERS: Final = 256
"""Servers of a report: keys cost nothing, and neither do announcements."""
MAX_ROUND_TRIPS: Final = 1024

Path = Literal["direct", "relay"]


@dataclass(frozen=True)
class LastVerdict:
    """What a validator of this machine found last; `time` in seconds since 1970."""

    verdict: str
    reason: str
    time: float


@dataclass(frozen=True)
class KnownServer:
    """A server as this node sees it.

    Attributes:
        round_trip: seconds to it and back, as they were measured last; None if they never were.
        path: how the bytes to it travel; None if that is not known.
        answers: whether it answered when it was asked last; None if it was not.
        verdict: of a validator of this machine; None if there is none.
    """

    said: Announcement
    round_trip: float | None = None
    path: Path | None = None
    answers: bool | None = None
    reputation: float = 0.0
    ban: Ban | None = None
    verdict: LastVerdict | None = None

    @property
    def serves(self) -> bool:
        """Whether this node would use it: it is not banned, and answers as far as is known."""
        return self.ban is None and self.answers is not False


@dataclass(frozen=True)
class SwarmState:
    """All that a report is made of.

    Attributes:
        model: as this node calls it.
        self_id: this node's peer id.
        peers: the addresses that this node joined by, of peers that are there.
        now: seconds since 1970.
        join: the command with a link for who has nothing of the swarm yet; empty if nobody who is there can be dialed.
    """

    model: str
    model_version: bytes
    num_blocks: int
    servers: Sequence[KnownServer]
    self_id: str
    peers: Sequence[str] = ()
    now: float = 0.0
    software_version: str = ""
    join: str = ""


def swarm_report(state: SwarmState) -> dict[str, Any]:
    """The JSON object of GET /v1/petalnode/swarm."""
    of_model = [known for known in state.servers if known.said.num_blocks == state.num_blocks]
    coverage = coverage_of((known.said for known in of_model if known.serves), state.num_blocks)
    shown = sorted(_first(of_model), key=lambda known: (known.said.span.start, known.said.span.end, known.said.peer_id))
    return {
        "time": round(state.now, 3),
        "self": state.self_id,
        "software_version": state.software_version,
        "model": state.model,
        "model_version": state.model_version.hex(),
        "num_blocks": state.num_blocks,
        "coverage": coverage,
        "missing_blocks": [[gap.start, gap.end] for gap in spans_with(coverage, 0)],
        "help": help_for(state, coverage),
        "servers": [server_report(known) for known in shown],
        "servers_left_out": len(of_model) - len(shown),
        "round_trips": round_trips(state.self_id, shown),
    }


def _first(servers: Sequence[KnownServer]) -> Sequence[KnownServer]:
    """Those that are shown if there are too many: the ones that this node has to do with, then the most reputed."""
    if len(servers) <= MAX_SERVERS:
        return servers
    return sorted(servers, key=lambda known: (known.path is None, -known.reputation, known.said.peer_id))[:MAX_SERVERS]


def server_report(known: KnownServer) -> dict[str, Any]:
    """One server, by the names that `petalnode status --json` has for the same."""
    said, ban = known.said, known.ban
    verdict: dict[str, Any] | None = None
    if ban is not None:
        verdict = {"verdict": "faulty", "reason": ban.reason, "source": ban.source, "time": None}
    elif known.verdict is not None:
        last = known.verdict
        verdict = {"verdict": last.verdict, "reason": last.reason, "source": "validator", "time": last.time}
    return {
        **announced_fields(said),
        "answers": known.answers,
        "path": known.path,
        "round_trip_ms": _ms(known.round_trip),
        "reputation": round(known.reputation, 4),
        "verdict": verdict,
        "banned_until": None if ban is None else ban.until,
    }


def announced_fields(said: Announcement) -> dict[str, Any]:
    """What a server says of itself, without its addresses: for the page, and for `petalnode status --json`."""
    return {
        "peer_id": said.peer_id,
        "name": said.public_name,
        "blocks": [said.span.start, said.span.end],
        "state": said.state.name.lower(),
        "next_blocks": [said.next_span.start, said.next_span.end] if said.next_span else None,
        "throughput": round(1 / said.step_seconds, 2) if said.step_seconds else 0.0,
        "cache_tokens_free": said.cache_tokens_free,
        "cache_tokens": said.cache_tokens,
        "queue_depth": said.queue_depth,
        "dtype": said.dtype,
        "quantisation": said.quantisation,
        "device": said.device,
        "adapters": [adapter.name for adapter in announced(said)],
        "software_version": said.software_version,
    }


def spans_with(coverage: Sequence[int], count: int) -> list[Span]:
    """The longest spans whose blocks have exactly `count` servers."""
    found = []
    for matches, blocks in groupby(range(len(coverage)), key=lambda block: coverage[block] == count):
        if matches:
            span = list(blocks)
            found.append(Span(span[0], span[-1] + 1))
    return found


def help_for(state: SwarmState, coverage: Sequence[int]) -> dict[str, str] | None:
    """What the swarm lacks, and the command that would help; None if every block has two servers.

    The address is some stranger's text: it is quoted, so that a shell takes it as one word.
    """
    address = _address(state)
    join = f" --peer {shlex.quote(address)}" if address else ""
    serve = f"petalnode serve {shlex.quote(state.model)}"
    send = {"join": state.join} if state.join else {}
    missing = spans_with(coverage, 0)
    if missing:
        blocks = describe_blocks([block for gap in missing for block in range(gap.start, gap.end)])
        text = f"Nobody serves {blocks}: no answers until somebody does. This serves {_what(missing)}."
        return {"text": text, "command": f"{serve} --blocks {missing[0]}{join}", **send}
    single = spans_with(coverage, 1)
    if not single:
        return None
    blocks = describe_blocks([block for span in single for block in range(span.start, span.end)])
    text = f"Each of {blocks} has one server: answers wait when it goes. One more machine helps; it chooses its blocks."
    return {"text": text, "command": f"{serve}{join}", **send}


def _what(missing: Sequence[Span]) -> str:
    return "them" if len(missing) == 1 else f"the first of them, {missing[0]}"


def _address(state: SwarmState) -> str | None:
    """Where the next server joins: where this node did, or at a server that is connected. Nobody who may be gone."""
    if state.peers:
        return state.peers[0]
    online = (
        known
        for known in state.servers
        if known.serves and known.path is not None and known.said.state is ServerState.ONLINE
    )
    ranked = sorted(online, key=lambda known: (known.path != "direct", known.said.peer_id))
    return next((f"{known.said.addrs[0]}/p2p/{known.said.peer_id}" for known in ranked if known.said.addrs), None)


def round_trips(self_id: str, servers: Sequence[KnownServer]) -> list[dict[str, Any]]:
    """Those that this node has measured, then what servers say of each other; milliseconds."""
    servers = [known for known in servers if known.answers is not False]
    listed = {known.said.peer_id for known in servers}
    own = [(self_id, known.said.peer_id, known.round_trip) for known in servers]
    told = [
        (known.said.peer_id, peer_id, seconds)
        for known in servers
        for peer_id, seconds in sorted(known.said.rtts.items())
        if peer_id in listed and peer_id != known.said.peer_id
    ]
    found = [
        {"from": start, "to": end, "ms": _ms(seconds)} for start, end, seconds in (*own, *told) if seconds is not None
    ]
    return found[:MAX_ROUND_TRIPS]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
