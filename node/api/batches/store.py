"""Files and batches on disk: one SQLite file, bounded, which outlives the process. Blocking: for worker threads."""

from __future__ import annotations

import io
import json
import secrets
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from ...errors import BadInput, MachineError


@dataclass(frozen=True)
class BatchStoreLimits:
    """What files and batches take on the disk, and how it is shared among owners."""

    disk_bytes: int = 1 << 30
    max_batches: int = 1000
    """Of one owner: the oldest of those that are over are forgotten."""
    object_bytes: int = 16 << 10
    """What a file or a batch counts for beside its content, so that a share bounds their number, too."""
    piece_bytes: int = 256 << 10
    """Of a file's content, which are in memory at once."""
    line_bytes: int = 128
    in_memory: int = 4 << 20
    share: int = 4
    page: int = 4096
    busy_seconds: float = 1.0


BATCH_STORE: Final = BatchStoreLimits()
OPEN: Final = ("validating", "in_progress", "cancelling")
"""The statuses of batches that are not over."""
_FILE: Final = "id, owner, name, purpose, created, bytes"
_VERSION: Final = 1
_TABLES: Final = """
CREATE TABLE files (id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL,
    created INTEGER NOT NULL, bytes INTEGER NOT NULL, content BLOB NOT NULL);
CREATE TABLE batches (id TEXT PRIMARY KEY, owner TEXT NOT NULL, endpoint TEXT NOT NULL, input TEXT NOT NULL,
    status TEXT NOT NULL, created INTEGER NOT NULL, fields TEXT NOT NULL, times TEXT NOT NULL,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0);
CREATE TABLE lines (batch TEXT NOT NULL, line INTEGER NOT NULL, custom_id TEXT NOT NULL, body TEXT NOT NULL,
    failed INTEGER, result TEXT, PRIMARY KEY (batch, line));
CREATE INDEX open_lines ON lines (batch, line) WHERE failed IS NULL;
"""
_HELD: Final = {
    "files": f"{BATCH_STORE.object_bytes} + {{0}}.bytes",
    "batches": f"{BATCH_STORE.object_bytes} + length(CAST({{0}}.fields AS BLOB))",
    "lines": f"{BATCH_STORE.line_bytes} + length(CAST({{0}}.custom_id AS BLOB)) + length(CAST({{0}}.body AS BLOB))"
    " + coalesce(length(CAST({0}.result AS BLOB)), 0)",
}
"""What a row of a table counts for its owner."""


class NoRoom(Exception):
    """The file has reached its bound, or the owner his share of it: of files, batches, their requests and answers."""


@dataclass(frozen=True)
class StoredFile:
    """A file without its content. `created` in seconds since 1970."""

    id: str
    owner: str
    name: str
    purpose: str
    created: int
    bytes: int


@dataclass(frozen=True)
class StoredBatch:
    """A batch.

    Attributes:
        status: as OpenAI calls it.
        fields: `metadata`, `errors`, `output_file_id` and `error_file_id`, as far as there are any.
        times: when it reached a status, by OpenAI's names (`completed_at`), in seconds since 1970.
        total, completed, failed: lines of its input.
    """

    id: str
    owner: str
    endpoint: str
    input: str
    status: str
    created: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True)
class BatchLine:
    """A request of a batch; `body` is JSON."""

    batch: str
    line: int
    custom_id: str
    body: str


class BatchStore:
    """Files and batches. Every call is a transaction: what has returned is on disk.

    Raises:
        BadInput: `path` is another kind of file.
        MachineError: it cannot be used, or another process uses it.
    """

    def __init__(self, path: Path, disk_bytes: int = BATCH_STORE.disk_bytes) -> None:
        self._share = disk_bytes // BATCH_STORE.share
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._connection = sqlite3.connect(path, timeout=BATCH_STORE.busy_seconds, check_same_thread=False)
            self._prepare(path, disk_bytes)
        except sqlite3.OperationalError as error:
            text = "another process uses it" if "locked" in str(error) else str(error)
            raise MachineError(f"cannot keep batches in {path}: {text}") from error
        except sqlite3.DatabaseError:
            raise BadInput(f"{path} is no file of batches: give another one") from None
        except OSError as error:
            raise MachineError(f"cannot keep batches in {path}: {error.strerror}") from error

    def _prepare(self, path: Path, disk_bytes: int) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode=EXCLUSIVE")
        run(f"PRAGMA page_size={BATCH_STORE.page}")
        run("PRAGMA auto_vacuum=INCREMENTAL")
        (version,) = run("PRAGMA user_version").fetchone()
        run("BEGIN EXCLUSIVE")  # which fails if another process has the file
        if version == 0 and not run("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _TABLES.split(";\n"):
                run(statement)
            run(f"PRAGMA user_version={_VERSION}")
        elif version != _VERSION:
            raise BadInput(f"{path} is no file of batches of this version: give another one")
        self._connection.commit()
        run(f"PRAGMA max_page_count={disk_bytes // BATCH_STORE.page}")
        self._count()

    def _count(self) -> None:
        """Counts what each owner has, and has SQLite do so with every change from now on."""
        run = self._connection.execute
        run("CREATE TEMP TABLE used (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL)")
        for table, held in _HELD.items():
            owner = "{0}.owner" if table != "lines" else "(SELECT owner FROM main.batches WHERE id = {0}.batch)"
            add = "INSERT INTO used VALUES ({0}, {1}) ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes"
            for event, changes in (("INSERT", ("+NEW",)), ("DELETE", ("-OLD",)), ("UPDATE", ("-OLD", "+NEW"))):
                steps = "; ".join(
                    add.format(owner.format(row[1:]), f"{row[0]}({held.format(row[1:])})") for row in changes
                )
                run(f"CREATE TEMP TRIGGER {event}_{table} AFTER {event} ON main.{table} BEGIN {steps}; END")
            rows = run(
                f"SELECT {owner.format(table)}, sum({held.format(table)}) FROM main.{table} GROUP BY 1"
            ).fetchall()
            for row in rows:
                run(add.format("?", "?"), row)
        self._connection.commit()

    def room(self, owner: str) -> int:
        """Bytes of a file that one owner may add."""
        with self._transaction() as run:
            return max(0, self._share - _used(run, owner) - BATCH_STORE.object_bytes)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self, owner: str | None = None) -> Iterator[sqlite3.Connection]:
        """Raises NoRoom, also if `owner` then has more than before, and more than his share."""
        with self._lock:
            try:
                with self._connection:
                    before = 0 if owner is None else _used(self._connection, owner)
                    yield self._connection
                    if owner is not None and max(before, self._share) < _used(self._connection, owner):
                        raise NoRoom(
                            f"the files and batches of one key may have {self._share:,} bytes: delete some files"
                        )
            except sqlite3.OperationalError as error:
                if "full" in str(error):
                    raise NoRoom("there is no room left for files and batches") from None
                raise

    # --- files

    def add_file(self, owner: str, name: str, purpose: str, content: bytes | IO[bytes]) -> StoredFile:
        """Raises NoRoom."""
        source = io.BytesIO(content) if isinstance(content, bytes) else content
        size = source.seek(0, io.SEEK_END)
        source.seek(0)
        stored = _new_file(owner, name, purpose, size)
        with self._transaction(owner) as run:
            _write_file(run, stored, _pieces(source))
        return stored

    def files(self, owner: str) -> list[StoredFile]:
        """Newest first."""
        with self._transaction() as run:
            rows = run.execute(f"SELECT {_FILE} FROM files WHERE owner = ? ORDER BY rowid DESC", (owner,)).fetchall()
        return [StoredFile(*row) for row in rows]

    def file(self, owner: str, name: str) -> StoredFile | None:
        with self._transaction() as run:
            row = run.execute(f"SELECT {_FILE} FROM files WHERE owner = ? AND id = ?", (owner, name)).fetchone()
        return None if row is None else StoredFile(*row)

    def piece(self, owner: str, name: str, start: int) -> bytes:
        """`BATCH_STORE.piece_bytes` of a file's content from `start` on; empty behind its end, or if it is gone."""
        with self._transaction() as run:
            row = run.execute("SELECT rowid FROM files WHERE id = ? AND owner = ?", (name, owner)).fetchone()
            if row is None:
                return b""
            with run.blobopen("files", "content", row[0], readonly=True) as blob:
                blob.seek(min(start, len(blob)))
                return blob.read(BATCH_STORE.piece_bytes)

    def content(self, owner: str, name: str) -> bytes | None:
        with self._transaction() as run:
            row = run.execute("SELECT content FROM files WHERE id = ? AND owner = ?", (name, owner)).fetchone()
        return None if row is None else bytes(row[0])

    def drop_file(self, owner: str, name: str) -> bool:
        """Whether there was one."""
        with self._transaction() as run:
            dropped = run.execute("DELETE FROM files WHERE id = ? AND owner = ?", (name, owner)).rowcount > 0
        with self._transaction() as run:
            run.execute("PRAGMA incremental_vacuum").fetchall()
        return dropped

    # --- batches

    def add_batch(self, batch: StoredBatch) -> None:
        """Raises NoRoom."""
        with self._transaction(batch.owner) as run:
            run.execute(
                f"DELETE FROM batches WHERE owner = ?1 AND status NOT IN {OPEN} AND id NOT IN "
                "(SELECT id FROM batches WHERE owner = ?1 ORDER BY rowid DESC LIMIT ?2)",
                (batch.owner, BATCH_STORE.max_batches - 1),
            )
            values = (*_values(batch)[:6], json.dumps(dict(batch.fields)), json.dumps(dict(batch.times)))
            run.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0)", values)

    def batches(self, owner: str | None = None) -> list[StoredBatch]:
        """Newest first; for None those of all owners that are not over."""
        where, given = (f"status IN {OPEN}", ()) if owner is None else ("owner = ?", (owner,))
        with self._transaction() as run:
            rows = run.execute(f"SELECT * FROM batches WHERE {where} ORDER BY rowid DESC", given).fetchall()
        return list(map(_batch, rows))

    def batch(self, owner: str, name: str) -> StoredBatch | None:
        with self._transaction() as run:
            row = run.execute("SELECT * FROM batches WHERE owner = ? AND id = ?", (owner, name)).fetchone()
        return None if row is None else _batch(row)

    def open_batches(self, owner: str) -> int:
        """How many of one owner are not over."""
        with self._transaction() as run:
            where = f"owner = ? AND status IN {OPEN}"
            return int(run.execute(f"SELECT count(*) FROM batches WHERE {where}", (owner,)).fetchone()[0])

    def set_status(self, name: str, status: str, **fields: Any) -> None:
        """Notes a status with its time, and `fields`."""
        with self._transaction() as run:
            _set_status(run, name, status, fields)

    def begin(self, name: str, lines: Iterable[tuple[int, str, str]]) -> None:
        """Notes the requests of a batch, the number, custom_id and body of each, and that they are answered now. Raises
        NoRoom."""
        with self._transaction(self._owner(name)) as run:
            run.execute("DELETE FROM lines WHERE batch = ?", (name,))
            run.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, NULL, NULL)", ((name, *one) for one in lines))
            (total,) = run.execute("SELECT count(*) FROM lines WHERE batch = ?", (name,)).fetchone()
            run.execute("UPDATE batches SET total = ? WHERE id = ?", (total, name))
            _set_status(run, name, "in_progress", {})

    def open_lines(self, name: str, behind: int, most: int) -> list[BatchLine]:
        """Requests that have no answer, those after line `behind`, in their order."""
        with self._transaction() as run:
            rows = run.execute(
                "SELECT batch, line, custom_id, body FROM lines WHERE batch = ? AND failed IS NULL AND line > ? "
                "ORDER BY line LIMIT ?",
                (name, behind, most),
            ).fetchall()
        return [BatchLine(*row) for row in rows]

    def note_result(self, line: BatchLine, failed: bool, result: str) -> None:
        """Raises NoRoom."""
        with self._transaction(self._owner(line.batch)) as run:
            noted = run.execute(
                "UPDATE lines SET failed = ?, result = ?, body = '' WHERE batch = ? AND line = ?",
                (int(failed), result, line.batch, line.line),
            ).rowcount
            column = "failed" if failed else "completed"
            if noted:  # else the batch was ended meanwhile
                run.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (line.batch,))

    def finish(self, batch: StoredBatch, status: str, **fields: Any) -> None:
        """Makes files of the results of a batch, and forgets its requests. Raises NoRoom."""
        with self._transaction() as run:
            for failed, key in ((0, "output_file_id"), (1, "error_file_id")):
                of = "FROM lines WHERE batch = ? AND failed = ?"
                with tempfile.SpooledTemporaryFile(BATCH_STORE.in_memory) as spool:
                    for (result,) in run.execute(f"SELECT result {of} ORDER BY line", (batch.id, failed)):
                        spool.write(f"{result}\n".encode())
                    size = spool.tell()
                    if not size:
                        continue
                    run.execute(f"DELETE {of}", (batch.id, failed))  # its room is that of the file
                    spool.seek(0)
                    made = _new_file(batch.owner, f"{batch.id}_{key[:-8]}.jsonl", "batch_output", size)
                    _write_file(run, made, _pieces(spool))
                    fields[key] = made.id
            run.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
            _set_status(run, batch.id, status, fields)

    def give_up(self, batch: StoredBatch, message: str) -> None:
        """Ends a batch that has no room, and makes some."""
        with self._transaction() as run:
            run.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
        self.set_status(batch.id, "failed", errors=no_room(message))

    def _owner(self, batch: str) -> str | None:
        with self._transaction() as run:
            row = run.execute("SELECT owner FROM batches WHERE id = ?", (batch,)).fetchone()
        return None if row is None else str(row[0])


def no_room(message: str) -> dict[str, Any]:
    """`errors` of a batch that has none."""
    return {"object": "list", "data": [{"code": "no_room", "message": message, "line": None, "param": None}]}


def _used(run: sqlite3.Connection, owner: str) -> int:
    row = run.execute("SELECT bytes FROM used WHERE owner = ?", (owner,)).fetchone()
    return 0 if row is None else int(row[0])


def _write_file(run: sqlite3.Connection, made: StoredFile, pieces: Iterable[bytes]) -> None:
    """Notes a file of known size, piece by piece."""
    sql = "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, zeroblob(?))"
    row = run.execute(sql, (*_values(made), made.bytes)).lastrowid
    assert row is not None
    with run.blobopen("files", "content", row) as blob:
        for piece in pieces:
            blob.write(piece)


def _pieces(source: IO[bytes]) -> Iterator[bytes]:
    while piece := source.read(BATCH_STORE.piece_bytes):
        yield piece


def _batch(row: Sequence[Any]) -> StoredBatch:
    return StoredBatch(*row[:6], json.loads(row[6]), json.loads(row[7]), *row[8:])  # type: ignore[call-arg]


def _set_status(run: sqlite3.Connection, name: str, status: str, fields: Mapping[str, Any]) -> None:
    """What is over stays so, and a batch that is cancelled while its input is read is not gone on with."""
    was, old, times = run.execute("SELECT status, fields, times FROM batches WHERE id = ?", (name,)).fetchone()
    if was not in OPEN or (was, status) == ("cancelling", "in_progress"):
        return
    reached = json.loads(times) | {f"{status}_at": int(time.time())}
    values = (status, json.dumps(json.loads(old) | dict(fields)), json.dumps(reached), name)
    run.execute("UPDATE batches SET status = ?, fields = ?, times = ? WHERE id = ?", values)


def _new_file(owner: str, name: str, purpose: str, size: int) -> StoredFile:
    return StoredFile(f"file-{secrets.token_hex(12)}", owner, name, purpose, int(time.time()), size)


def _values(stored: StoredFile | StoredBatch) -> tuple[Any, ...]:
    return tuple(getattr(stored, name) for name in stored.__dataclass_fields__)
