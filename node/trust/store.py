"""What a node keeps about others in a file of sqlite: who may read it, and what is done when it is damaged."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeVar

import trio
from filelock import FileLock

from ...crypto.identity import make_private_file, make_private_folder, others_can_read
from ..errors import MachineError
from .evidence_message import NO_VALIDATORS, TrustedValidators
from .reputation import REPUTATION, Ban, ServiceRecord, Source, extended, newcomer, penalty_seconds, reputation

log = logging.getLogger(__name__)

_DAMAGE: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def prepare_file(file: Path) -> None:
    """Makes the file and its folder, for this user alone; tells once of a file that others can read.

    What sqlite keeps beside it has the permissions of the file.

    Raises:
        OSError: it cannot be made, or opened.
    """
    make_private_folder(file.parent)
    make_private_file(file)
    if others_can_read(file):
        _tell(file)


@functools.lru_cache(maxsize=64)
def _tell(file: Path) -> None:
    log.warning("others on this machine can read %s: chmod 600 %s", file, file)


def is_damage(error: Exception) -> bool:
    """Whether sqlite says that the file is no database, and not that it cannot be used now."""
    # The extended codes have more in the bytes above. Errors of the module itself have none.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE


def move_aside(file: Path, *, timeout: float) -> Path | None:
    """Moves a damaged database away, under a name with the time; returns its new name. Nothing is deleted.

    Of several processes that find the damage one moves the file. For the others, as for a file that is well, this
    returns None.

    Raises:
        OSError: it cannot be moved, or another process is at it for more than `timeout` seconds.
    """
    with FileLock(file.with_name(file.name + ".lock"), timeout=timeout):
        if not _is_damaged(file):
            return None
        stem = f"{file.name}.damaged-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        aside = next(name for n in range(1000) if not (name := file.with_name(f"{stem}{n or ''}")).exists())
        os.rename(file, aside)
        return aside


def _is_damaged(file: Path) -> bool:
    if not file.is_file():
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
            (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
            return bool(found != "ok")
    except sqlite3.Error as error:
        return is_damage(error)


def _inode(file: Path) -> int:
    """Of the file that has this name now; 0 if none has. sqlite says of one that was moved away that the disk fails."""
    with contextlib.suppress(OSError):
        return file.stat().st_ino
    return 0


class Database:
    """Base of what a validator keeps in an sqlite file of its own. A context manager.

    Attributes:
        NAME: what the file is to people.

    Raises:
        MachineError: the file cannot be written, or is no database.
    """

    NAME: ClassVar[str]

    def __init__(self, file: Path, schema: str, pragmas: Sequence[str] = (), **options: Any) -> None:
        self._file = file
        try:
            prepare_file(file)
            self._database = sqlite3.connect(file, check_same_thread=False, timeout=10, **options)
            for pragma in pragmas:
                self._database.execute(f"PRAGMA {pragma}")
            self._database.executescript(schema)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> MachineError:
        return MachineError(
            f"the validator's {self.NAME} {self._file} cannot be used ({error}): free the disk, or move the file away"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()


@dataclass(frozen=True)
class StoreLimits:
    """What is kept of others, and how often it is written."""

    save_interval: float = 15.0  # Seconds
    max_records: int = 20_000
    max_versions: int = 1_000
    busy_seconds: float = 5.0


STORE: Final = StoreLimits()
_SCHEMA: Final = 0
"""`user_version` of a file that this version reads; that of one with other tables will be higher."""
T = TypeVar("T", str, bytes)
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS bans (peer_id TEXT PRIMARY KEY, until REAL, reason TEXT, source TEXT, count INTEGER);
CREATE TABLE IF NOT EXISTS standings
  (peer_id TEXT PRIMARY KEY, first_seen REAL, updated REAL, tokens REAL, faults REAL);
CREATE TABLE IF NOT EXISTS versions (weights BLOB PRIMARY KEY, version BLOB, used REAL);
"""


def trust_file(data_dir: Path) -> Path:
    """The file that all nodes of this person share."""
    return data_dir / "trust.sqlite"


@dataclass(frozen=True)
class _Changes:
    """What is written: rows of the tables, and whose are deleted. Without `now` nothing is written."""

    now: float | None = None
    bans: Sequence[tuple[object, ...]] = ()
    records: Sequence[tuple[object, ...]] = ()
    versions: Sequence[tuple[object, ...]] = ()
    forgotten: str | None = None

    def write(self, connection: sqlite3.Connection) -> None:
        if self.forgotten is not None:
            connection.execute("DELETE FROM bans WHERE peer_id = ?", (self.forgotten,))
            connection.execute("DELETE FROM standings WHERE peer_id = ?", (self.forgotten,))
        if self.now is None:
            return
        connection.executemany(
            "INSERT INTO bans (peer_id, until, reason, source, count) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (peer_id) DO UPDATE SET until = max(until, excluded.until), reason = excluded.reason, "
            "source = excluded.source, count = max(count, excluded.count)",
            self.bans,
        )
        connection.executemany(
            "INSERT OR REPLACE INTO standings (peer_id, first_seen, updated, tokens, faults) VALUES (?, ?, ?, ?, ?)",
            self.records,
        )
        connection.executemany(
            "INSERT OR REPLACE INTO versions (weights, version, used) VALUES (?, ?, ?)", self.versions
        )
        connection.execute(
            "DELETE FROM versions WHERE weights NOT IN (SELECT weights FROM versions ORDER BY used DESC LIMIT ?)",
            (STORE.max_versions,),
        )
        connection.execute(
            "DELETE FROM standings WHERE peer_id NOT IN (SELECT peer_id FROM standings ORDER BY updated DESC LIMIT ?)",
            (STORE.max_records,),
        )
        connection.execute("DELETE FROM bans WHERE until < ?", (self.now,))


class TrustStore:
    """Bans and service records in memory, written to `file` now and then; without one they last as long as the process.

    Several processes of one person may use one file: every process reads what the others wrote when it reads or writes
    it. Of two bans the longer one stays. A damaged file is moved away, and a new one is begun with what is in memory. A
    file that cannot be used for another reason (full disk, lock, permissions, a newer version's tables) stays as it is:
    that is logged once, and it is tried again at the next time.
    """

    def __init__(
        self,
        file: Path | None = None,
        trusted: TrustedValidators = NO_VALIDATORS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.trusted = trusted
        self._file = file
        self._clock = clock
        self._bans: dict[str, Ban] = {}
        self._records: dict[str, ServiceRecord] = {}
        self._versions: dict[bytes, tuple[bytes, float]] = {}  # and when it was used, by what is held of the model
        self._dirty_bans: set[str] = set()
        self._dirty_records: set[str] = set()
        self._dirty_versions: set[bytes] = set()
        self._anew = False  # whether the file has been begun anew since it was written
        self._told: str | None = None  # why the file could not be used the last time

    # --- bans

    def ban(self, peer_id: str, reason: str, source: Source) -> Ban:
        """Bans a peer, for longer if it was banned before, and resets its reputation."""
        now = self._clock()
        found = extended(self._bans.get(peer_id), peer_id, reason, source, now)
        self._bans[peer_id] = found
        self._dirty_bans.add(peer_id)
        self._note(peer_id, (self._records.get(peer_id) or newcomer(now)).after_fault(now))
        while len(self._bans) > REPUTATION.max_bans:
            del self._bans[min(list(self._bans), key=lambda peer: self._bans[peer].until)]
        log.warning("%s is not used any more: %s", peer_id, reason)
        return found

    def ban_of(self, peer_id: str) -> Ban | None:
        """The ban that holds now."""
        found = self._bans.get(peer_id)
        return found if found is not None and found.holds(self._clock()) else None

    def is_banned(self, peer_id: str) -> bool:
        return self.ban_of(peer_id) is not None

    def bans(self) -> list[Ban]:
        """All bans that hold now, the longest first. The file may be read in another thread meanwhile."""
        now = self._clock()
        return sorted((ban for ban in list(self._bans.values()) if ban.holds(now)), key=lambda ban: -ban.until)

    def forgive(self, peer_id: str) -> bool:
        """Lifts a ban, here and in the file at once; whether there was one. Other processes that run keep theirs.

        Raises:
            MachineError: not in the file, which cannot be used.
        """
        found = self._bans.pop(peer_id, None) is not None
        self._dirty_bans.discard(peer_id)
        self._records.pop(peer_id, None)
        self._dirty_records.discard(peer_id)
        self._use(_Changes(forgotten=peer_id))
        return found

    # --- reputation

    def note_tokens(self, peer_id: str, tokens: int, *, recomputed: bool = False) -> None:
        """Counts tokens that a peer answered with valid receipts, or that were recomputed and right."""
        now = self._clock()
        self._note(
            peer_id, (self._records.get(peer_id) or newcomer(now)).after_tokens(tokens, now, recomputed=recomputed)
        )

    def reputation(self, peer_id: str) -> float:
        """From 0 to 1."""
        return reputation(self._records.get(peer_id), self._clock())

    def proven_of(self, peers: Iterable[str]) -> frozenset[str]:
        """Those of these peers of whom `is_proven`."""
        return frozenset(filter(self.is_proven, peers))

    def is_proven(self, peer_id: str) -> bool:
        """Whether the peer has computed for this node, as far as that is not forgotten."""
        return self.reputation(peer_id) > 0

    def penalty_seconds(self, peer_id: str) -> float:
        """What routing adds to the cost of the peer."""
        return penalty_seconds(self._records.get(peer_id), self._clock())

    def _note(self, peer_id: str, record: ServiceRecord) -> None:
        self._records[peer_id] = record
        self._dirty_records.add(peer_id)
        if len(self._records) > STORE.max_records:
            by_age = sorted(self._records, key=lambda peer: self._records[peer].updated)
            for oldest in by_age[: STORE.max_records // 10]:
                del self._records[oldest]

    # --- model versions

    def note_version(self, weights: bytes, version: bytes) -> None:
        """Remembers which model version this node has used with these weights of its own (`held_weights`)."""
        self._versions[weights] = version, self._clock()
        self._dirty_versions.add(weights)
        while len(self._versions) > STORE.max_versions:
            del self._versions[min(list(self._versions), key=lambda held: self._versions[held][1])]

    def version_used(self, weights: bytes) -> bytes | None:
        """The model version that was used with these weights the last time."""
        return self._versions.get(weights, (None, 0.0))[0]

    # --- the file

    def load(self) -> None:
        """Reads the file; what is wrong with it is logged."""
        with self._logged():
            self.read()

    def read(self) -> None:
        """Reads the file.

        Raises:
            MachineError: it cannot be known what was in the file: it cannot be used, or was damaged and has been moved
                away, once for all processes.
        """
        self._use(_Changes())

    def _read(self, connection: sqlite3.Connection) -> None:
        bans = "SELECT peer_id, until, reason, source, count FROM bans WHERE until > ? LIMIT ?"
        for row in connection.execute(bans, (self._clock(), REPUTATION.max_bans)):
            held = self._bans.get(row[0])
            if held is None or held.until < row[1]:
                self._bans[row[0]] = Ban(*row)
        records = "SELECT peer_id, first_seen, updated, tokens, faults FROM standings ORDER BY updated DESC LIMIT ?"
        for peer_id, *rest in connection.execute(records, (STORE.max_records,)):
            if peer_id not in self._dirty_records:
                self._records[peer_id] = ServiceRecord(*rest)
        versions = "SELECT weights, version, used FROM versions ORDER BY used DESC LIMIT ?"
        for weights, version, used in connection.execute(versions, (STORE.max_versions,)):
            if weights not in self._dirty_versions:
                self._versions[weights] = version, used

    def save(self) -> None:
        """Writes what has changed, and reads what others have; what is wrong with the file is logged."""
        with self._logged():
            self._write()
        if self._anew:
            self._anew = False
            with self._logged():
                self._write()

    def _write(self) -> None:
        bans = [self._bans[peer] for peer in self._take(self._dirty_bans) if peer in self._bans]
        used = [(held, *self._versions[held]) for held in self._take(self._dirty_versions) if held in self._versions]
        names = self._take(self._dirty_records)
        records = [(name, self._records[name]) for name in names if name in self._records]
        changes = _Changes(
            self._clock(),
            [(ban.peer_id, ban.until, ban.reason, ban.source, ban.count) for ban in bans],
            [(name, held.first_seen, held.updated, held.tokens, held.faults) for name, held in records],
            used,
        )
        try:
            self._use(changes)
        except MachineError:
            self._dirty_bans.update(ban.peer_id for ban in bans)
            self._dirty_versions.update(held for held, *_ in used)
            self._dirty_records.update(names)
            raise

    @staticmethod
    def _take(names: set[T]) -> list[T]:
        taken = []
        while names:
            taken.append(names.pop())
        return taken

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        """Logs why the file cannot be used, if that was not said before."""
        told, self._told = self._told, None
        try:
            yield
        except MachineError as error:
            self._told = str(error)
            if self._told != told:
                log.warning("%s", error)

    def _use(self, changes: _Changes) -> None:
        """Changes the file, and reads it. One that is damaged is moved away first, and all in memory is written anew.

        Raises:
            MachineError: the file cannot be used, or this has moved it away.
        """
        if self._file is None:
            return
        try:
            aside = self._tried(self._file, changes)
        except (OSError, sqlite3.Error) as error:
            raise MachineError(f"what is known of other nodes cannot be kept in {self._file}: {error}") from error
        if aside is not None:
            raise MachineError(
                f"{self._file}, which says who is banned, was damaged: it has been moved to {aside}, and a new file is "
                "begun. Who was banned before is used again. What can be read of the old file: "
                f"sqlite3 {aside} .recover"
            )

    def _tried(self, file: Path, changes: _Changes) -> Path | None:
        """Changes and reads the file, or moves the damaged file away and returns its new name."""
        place = _inode(file)
        try:
            self._exchange(file, changes)
        except sqlite3.Error as error:
            if not is_damage(error) and _inode(file) == place:
                raise
            self._anew = True
            self._dirty_bans.update(self._bans)
            self._dirty_records.update(self._records)
            self._dirty_versions.update(self._versions)
            if (aside := move_aside(file, timeout=STORE.busy_seconds)) is not None:
                return aside
            self._exchange(file, changes)  # another process has moved it
        return None

    def _exchange(self, file: Path, changes: _Changes) -> None:
        prepare_file(file)
        with contextlib.closing(sqlite3.connect(file, timeout=STORE.busy_seconds)) as connection:
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
            if schema > _SCHEMA:
                raise OSError(f"a newer version of petalnode has written it (tables of version {schema})")
            connection.executescript(_TABLES)
            with connection:
                changes.write(connection)
                self._read(connection)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Reads the file at once, and writes it every `STORE.save_interval` and at the end of the block."""
        await trio.to_thread.run_sync(self.load)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep)
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self.save)

    async def _keep(self) -> None:
        while True:
            await trio.sleep(STORE.save_interval)
            await trio.to_thread.run_sync(self.save)
