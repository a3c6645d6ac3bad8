"""Sqlite files: who may read them; those of a validator, and what is said when one of these cannot be used."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from filelock import FileLock

from ...crypto.identity import make_private_file, make_private_folder, others_can_read
from ..errors import MachineError

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
    """Whether sqlite says that the bytes of the file are none of a database, and not that they cannot be used now."""
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
