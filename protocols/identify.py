"""/ipfs/id/1.0.0: what a peer says of itself, and under which address it sees us.

https://github.com/libp2p/specs/blob/master/identify/README.md. libp2p's host answers it; asking is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from . import standard_pb2 as standard
from .autonat import readable_addrs
from .delimited import DelimitedStream

IDENTIFY: Final = "/ipfs/id/1.0.0"
MAX_MESSAGE: Final = 64 * 1024  # bytes
_MAX_LISTED: Final = 64


@dataclass(frozen=True)
class Identified:
    """`observed` is the textual multiaddr from which the peer sees us come; `addrs` those it listens on."""

    observed: str | None
    addrs: tuple[str, ...]
    protocols: tuple[str, ...]


async def ask_identify(stream: DelimitedStream, *, timeout: float) -> Identified:
    """What the peer says. Nothing is sent: the protocol starts with its answer.

    Raises:
        PeerError: no answer within `timeout` seconds, or none that can be read.
    """
    message = await stream.receive(standard.Identify, timeout=timeout)
    observed = readable_addrs([message.observed_addr]) if message.observed_addr else ()
    return Identified(
        observed=observed[0] if observed else None,
        addrs=readable_addrs(message.listen_addrs[:_MAX_LISTED]),
        protocols=tuple(message.protocols[:_MAX_LISTED]),
    )
