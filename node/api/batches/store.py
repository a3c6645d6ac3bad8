"""Files and batches on disk: one SQLite file, bounded, which outlives the process. Blocking: for worker threads."""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ...errors import BadInput, MachineError

DISK_BYTES: Final = 1 << 30
OPEN: Final = ("validating", "in_progress", "cancelling")
"""The statuses of batches that are not over."""
_SHARE: Final = 4
_PAGE: Final = 4096
_VERSION: Final = 1
_BUSY_SECONDS: Final = 1.0
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


class NoRoom(Exception):
    """The file has reached its bound, or the owner his share of it."""


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

    def __init__(self, path: Path, disk_bytes: int = DISK_BYTES) -> None:
        self._share = disk_bytes // _SHARE
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False)
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
        run(f"PRAGMA page_size={_PAGE}")
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
        run(f"PRAGMA max_page_count={disk_bytes // _PAGE}")

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Raises NoRoom."""
        with self._lock:
            try:
                with self._connection:
                    yield self._connection
            except sqlite3.OperationalError as error:
                if "full" in str(error):
                    raise NoRoom("there is no room left for files and batches") from None
                raise

    # --- files

    def add_file(self, owner: str, name: str, purpose: str, content: bytes) -> StoredFile:
        """Raises NoRoom."""
        stored = _new_file(owner, name, purpose, len(content))
        with self._transaction() as run:
            (used,) = run.execute("SELECT coalesce(sum(bytes), 0) FROM files WHERE owner = ?", (owner,)).fetchone()
            if used + len(content) > self._share:
                raise NoRoom(f"the files of one key may have {self._share:,} bytes: delete some")
            run.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", (*_values(stored), content))
        return stored

    def files(self, owner: str) -> list[StoredFile]:
        """Newest first."""
        with self._transaction() as run:
            rows = run.execute(
                "SELECT id, owner, name, purpose, created, bytes FROM files WHERE owner = ? ORDER BY rowid DESC",
                (owner,),
            ).fetchall()
        return [StoredFile(*row) for row in rows]

    def file(self, owner: str, name: str) -> StoredFile | None:
        return next((found for found in self.files(owner) if found.id == name), None)

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
        with self._transaction() as run:
            values = (*_values(batch)[:6], json.dumps(dict(batch.fields)), json.dumps(dict(batch.times)))
            run.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0)", values)

    def batches(self, owner: str | None = None) -> list[StoredBatch]:
        """Newest first; for None those of all owners that are not over."""
        where, given = (f"status IN {OPEN}", ()) if owner is None else ("owner = ?", (owner,))
        with self._transaction() as run:
            rows = run.execute(f"SELECT * FROM batches WHERE {where} ORDER BY rowid DESC", given).fetchall()
        return [
            StoredBatch(*row[:6], json.loads(row[6]), json.loads(row[7]), *row[8:])  # type: ignore[call-arg]
            for row in rows
        ]

    def batch(self, owner: str, name: str) -> StoredBatch | None:
        return next((found for found in self.batches(owner) if found.id == name), None)

    def set_status(self, name: str, status: str, **fields: Any) -> None:
        """Notes a status with its time, and `fields`."""
        with self._transaction() as run:
            _set_status(run, name, status, fields)

    def begin(self, name: str, lines: Iterable[tuple[int, str, str]]) -> None:
        """Notes the requests of a batch, the number, custom_id and body of each, and that they are answered now. Raises
        NoRoom."""
        with self._transaction() as run:
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
        with self._transaction() as run:
            run.execute(
                "UPDATE lines SET failed = ?, result = ?, body = '' WHERE batch = ? AND line = ?",
                (int(failed), result, line.batch, line.line),
            )
            column = "failed" if failed else "completed"
            run.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (line.batch,))

    def finish(self, batch: StoredBatch, status: str, **fields: Any) -> None:
        """Makes files of the results of a batch, and forgets its requests. Raises NoRoom."""
        with self._transaction() as run:
            for failed, key in ((0, "output_file_id"), (1, "error_file_id")):
                rows = run.execute(
                    "SELECT result FROM lines WHERE batch = ? AND failed = ? ORDER BY line", (batch.id, failed)
                ).fetchall()
                if rows:
                    content = "".join(f"{row[0]}\n" for row in rows).encode()
                    made = _new_file(batch.owner, f"{batch.id}_{key[:-8]}.jsonl", "batch_output", len(content))
                    run.execute("DELETE FROM lines WHERE batch = ? AND failed = ?", (batch.id, failed))
                    run.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", (*_values(made), content))
                    fields[key] = made.id
            run.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
            _set_status(run, batch.id, status, fields)

    def give_up(self, batch: StoredBatch, message: str) -> None:
        """Ends a batch that has no room, and makes some."""
        with self._transaction() as run:
            run.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
        errors = {"object": "list", "data": [{"code": "no_room", "message": message, "line": None, "param": None}]}
        self.set_status(batch.id, "failed", errors=errors)


def _set_status(run: sqlite3.Connection, name: str, status: str, fields: Mapping[str, Any]) -> None:
    old, times = run.execute("SELECT fields, times FROM batches WHERE id = ?", (name,)).fetchone()
    reached = json.loads(times) | {f"{status}_at": int(time.time())}
    values = (status, json.dumps(json.loads(old) | dict(fields)), json.dumps(reached), name)
    run.execute("UPDATE batches SET status = ?, fields = ?, times = ? WHERE id = ?", values)


def _new_file(owner: str, name: str, purpose: str, size: int) -> StoredFile:
    return StoredFile(f"file-{secrets.token_hex(12)}", owner, name, purpose, int(time.time()), size)


def _values(stored: StoredFile | StoredBatch) -> tuple[Any, ...]:
    return tuple(getattr(stored, name) for name in stored.__dataclass_fields__)
