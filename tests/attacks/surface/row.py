"""A row of the table of what handles bytes of strangers."""

from __future__ import annotations

from dataclasses import dataclass

PEER, SERVER, CLIENT, FILE = "any peer", "a server that is asked", "any peer, as a client", "who made the file"


@dataclass(frozen=True)
class Row:
    """
    Attributes:
        by: who may send it.
        size, time, entries: constants, with blanks between; of what another row bounds, "as " and its name.
        tests: files, or FILE::FUNCTION.
        fuzz: targets of tests/fuzz.
        attack: names in the catalogue of `stranger/`.
    """

    by: str
    size: str
    time: str
    entries: str
    tests: tuple[str, ...] = ()
    fuzz: tuple[str, ...] = ()
    attack: tuple[str, ...] = ()
