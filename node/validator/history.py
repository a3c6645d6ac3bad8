"""A validator's verdicts in an sqlite file; the oldest make room for new ones."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

from ..trust.store import Database
from ..verification.verdicts import Verdict

MAX_VERDICTS: Final = 100_000
"""About 30 MB."""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS verdicts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    time REAL NOT NULL,
    model_version BLOB NOT NULL,
    peer_id TEXT NOT NULL,
    first_block INTEGER NOT NULL,
    end_block INTEGER NOT NULL,
    verdict TEXT NOT NULL,
    kind TEXT NOT NULL,
    reason TEXT NOT NULL,
    error REAL,
    tolerance REAL,
    requests INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS by_peer ON verdicts (model_version, peer_id, time);
"""


class History(Database):
    """Verdicts of one validator. Used by one thread at a time."""

    NAME = "history"

    def __init__(self, file: Path) -> None:
        super().__init__(file, _SCHEMA)

    def add(self, model_version: bytes, verdict: Verdict, now: float | None = None) -> None:
        """Adds a verdict, and removes the oldest of too many."""
        blocks = (verdict.blocks.start, verdict.blocks.end)
        found = (verdict.verdict, verdict.kind, verdict.reason, verdict.error, verdict.tolerance, verdict.requests)
        row = (time.time() if now is None else now, model_version, verdict.peer_id, *blocks, *found)
        try:
            with self._database:
                self._database.execute(f"INSERT INTO verdicts VALUES (NULL{', ?' * len(row)})", row)
                self._database.execute(
                    "DELETE FROM verdicts WHERE number <= (SELECT MAX(number) FROM verdicts) - ?", (MAX_VERDICTS,)
                )
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def seconds_since(self, model_version: bytes, now: float | None = None) -> dict[str, float]:
        """By peer id, how long ago its last verdict by a probe was.

        Audits do not count: a server whose own client shares good receipts all the time would be probed less.
        """
        moment = time.time() if now is None else now
        asked = (
            "SELECT peer_id, MAX(time) FROM verdicts WHERE model_version = ? AND kind != 'receipts' GROUP BY peer_id"
        )
        try:
            rows = self._database.execute(asked, (model_version,)).fetchall()
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        return {peer_id: max(0.0, moment - last) for peer_id, last in rows}


def last_verdicts(file: Path, model_version: bytes) -> Mapping[str, tuple[str, str, float]]:
    """(verdict, reason, seconds since 1970) of each server's last verdict, from the file of a validator that may be
    running. Empty if there is no such file, or none that can be read."""
    if not file.is_file():
        return {}
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=1)) as database:
            rows = database.execute(
                "SELECT peer_id, verdict, reason, time, MAX(number) FROM verdicts WHERE model_version = ? "
                "GROUP BY peer_id",
                (model_version,),
            )
            return {peer_id: (verdict, reason, then) for peer_id, verdict, reason, then, _ in rows}
    except sqlite3.Error:
        return {}
