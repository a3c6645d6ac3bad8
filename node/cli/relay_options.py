"""What a public node gives to those behind NAT: options of the commands that run for long."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ..network.nat.limits import RelayLimits
from .rates import parse_rate

RelayReservations = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help=f"Be the relay of so many peers at a time ({RelayLimits().reservations})."),
]
RelayCircuits = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help=f"Relay so many connections at a time ({RelayLimits().circuits})."),
]
RelayRate = Annotated[
    str | None,
    typer.Option(metavar="RATE", help="Relay no more than this per second, such as 10MB, in all."),
]


def relay_limits(reservations: int | None, circuits: int | None, rate: str | None) -> RelayLimits:
    """The limits that these options set, the others as they are.

    Raises:
        BadInput: the rate is none.
    """
    usual = RelayLimits()
    return replace(
        usual,
        reservations=usual.reservations if reservations is None else reservations,
        circuits=usual.circuits if circuits is None else circuits,
        bytes_per_second=usual.bytes_per_second if rate is None else parse_rate(rate, "--relay-rate"),
    )
