"""The log of a process: on standard error, as lines for a person or a JSON object each; quiet unless asked for."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Final, TextIO

from ..errors import BadInput

FORMATS: Final = ("text", "json")


class TextLines(logging.Formatter):
    """A line for a person. What a peer has said may stand in it, and cannot make lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in line)


class JsonLines(logging.Formatter):
    """A JSON object a line: time (UTC, RFC 3339), level, logger, message; the session that it is about, and the
    traceback of an error, where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        session = getattr(record, "session", None)
        if session is not None:
            fields["session"] = session
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is standard error now: a panel at a terminal stands in its place for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """It has no other."""


def begin() -> None:
    """Warnings and errors of all libraries go to standard error from now on."""
    handler = _StandardError()
    handler.setFormatter(TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def set_logs(level: str, form: str) -> None:
    """What `--log-level` and `--log-format` say.

    Raises:
        BadInput: there is no such level or format.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise BadInput(f"--log-level {level}: use debug, info, warning or error")
    if form not in FORMATS:
        raise BadInput(f"--log-format {form}: use {' or '.join(FORMATS)}")
    logging.getLogger("petalnode").setLevel(number)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _StandardError):
            handler.setFormatter(JsonLines() if form == "json" else TextLines())
