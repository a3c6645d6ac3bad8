"""The options for relaying, of the commands that run for long."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from ..network.nat.relay import RelayLimits
from ..network.transport.bandwidth import parse_rate


@dataclass(frozen=True)
class RelayOptions:
    """How much a public node relays for nodes behind NAT."""

    relay_reservations: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help=f"Relay for at most N peers at a time. Default: {RelayLimits().reservations}.",
        ),
    ] = None
    relay_circuits: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help=f"Relay at most N connections at a time. Default: {RelayLimits().circuits}.",
        ),
    ] = None
    relay_rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Relay at most this many bytes per second in total, such as 10MB."),
    ] = None

    def limits(self) -> RelayLimits:
        """The limits that these options set; the default for each one that is not given.

        Raises:
            BadInput: --relay-rate is not a rate.
        """
        given = {
            "reservations": self.relay_reservations,
            "circuits": self.relay_circuits,
            "bytes_per_second": parse_rate(self.relay_rate, "--relay-rate"),
        }
        return replace(RelayLimits(), **{name: value for name, value in given.items() if value is not None})
