"""The servers of a running swarm as a fleet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ....protocols.announcement import Announcement
from ...swarm import cost
from .fleet import Fleet, Machine


def fleet_of_servers(servers: Sequence[Announcement], client_rtts: Mapping[str, float]) -> Fleet:
    """Servers of one model as machines that could hold as many blocks as they do now, any of them.

    `client_rtts` are seconds from this client by peer id, of all `servers`; between two servers counts what the one
    that sends announced.
    """
    spans = [len(server.span) for server in servers]
    seconds = cost.block_seconds(
        cost.span_seconds([server.step_seconds for server in servers], [0.0] * len(servers), [0.0] * len(servers)),
        spans,
    )
    machines = [
        Machine(
            server.public_name or "…" + server.peer_id[-8:],
            len(server.span),
            float(each),
            server.span,
        )
        for server, each in zip(servers, seconds, strict=True)
    ]
    rtts = np.array([[one.rtts.get(other.peer_id, math.nan) for other in servers] for one in servers], float)
    np.fill_diagonal(rtts, 0.0)
    return Fleet(tuple(machines), rtts, np.array([client_rtts[server.peer_id] for server in servers]))
