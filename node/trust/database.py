"""Sqlite files: who may read them; those of a validator, and what is said when one of these cannot be used."""

from __future__ import annotations

import functools
import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from ...crypto.identity import make_private_file, make_private_folder, others_can_read
from ..errors import MachineError

log = logging.getLogger(__name__)


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
