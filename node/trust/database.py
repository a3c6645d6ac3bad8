"""A validator's sqlite files: opened, closed, and what is said when one cannot be used."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from ..errors import MachineError


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
            file.parent.mkdir(parents=True, exist_ok=True)
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
