"""Files and batches as OpenAI has them, and the lines of a batch's files. Pure."""

from __future__ import annotations

import io
import json
import secrets
from dataclasses import dataclass
from typing import Any, Final

from ..errors import ApiError
from ..fields import BODY, parse_object
from .store import BatchLine, StoredBatch, StoredFile

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
WINDOW_SECONDS: Final = 24 * 3600
_MAX_ERRORS: Final = 20
_TIMES: Final = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def file_object(stored: StoredFile) -> dict[str, Any]:
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.bytes,
        "created_at": stored.created,
        "filename": stored.name,
        "purpose": stored.purpose,
        "status": "processed",
    }


def batch_object(stored: StoredBatch) -> dict[str, Any]:
    """What has not happened is left out."""
    given = stored.fields
    happened = {name: given.get(name) for name in ("errors", "output_file_id", "error_file_id")}
    happened |= {f"{name}_at": stored.times.get(f"{name}_at") for name in _TIMES}
    return {
        "id": stored.id,
        "object": "batch",
        "endpoint": stored.endpoint,
        "input_file_id": stored.input,
        "completion_window": "24h",
        "status": stored.status,
        "created_at": stored.created,
        "expires_at": stored.created + WINDOW_SECONDS,
        **{name: value for name, value in happened.items() if value is not None},
        "request_counts": {"total": stored.total, "completed": stored.completed, "failed": stored.failed},
        "metadata": given.get("metadata"),
    }


def result_line(line: BatchLine, status: int, body: Any) -> str:
    """A line of the output or the error file."""
    response = {"status_code": status, "request_id": f"req_{secrets.token_hex(12)}", "body": body}
    found = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": None,
    }
    return json.dumps(found, ensure_ascii=False)


@dataclass(frozen=True)
class InputFault:
    """What is wrong with a line of a batch's input."""

    code: str
    message: str
    line: int | None = None

    def fields(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "line": self.line, "param": None}


def read_input(
    content: bytes, endpoint: str, most: int, line_bytes: int = BODY.max_bytes
) -> tuple[list[tuple[int, str, str]], list[InputFault]]:
    """The requests of an input file (line, custom_id, body as JSON), and what is wrong with it: one of both.

    Args:
        most: requests; as many empty lines may be there, too.
    """
    found: list[tuple[int, str, str]] = []
    faults: list[InputFault] = []
    known: set[str] = set()
    for number, text in enumerate(io.BytesIO(content), 1):
        blank = not text.strip()
        if number > 2 * most or (len(found) >= most and not blank):
            return [], [InputFault("too_many_requests", f"a batch has {most:,} requests at most", number)]
        if len(faults) >= _MAX_ERRORS:
            break
        if blank:
            continue
        try:
            custom_id, body = _request(text, endpoint, line_bytes)
            if custom_id in known:
                told = f"the custom_id {custom_id[:100]!r} is there twice"
                raise ApiError(400, told, code="duplicate_custom_id")
        except ApiError as error:
            faults.append(InputFault(error.code or "invalid_request", str(error), number))
            continue
        known.add(custom_id)
        found.append((number, custom_id, body))
    if not found and not faults:
        faults.append(InputFault("empty_file", "there are no requests in the file"))
    return ([] if faults else found), faults


def _request(text: bytes, endpoint: str, line_bytes: int) -> tuple[str, str]:
    """Raises ApiError."""
    fields = parse_object(text, line_bytes)
    custom_id = fields.text("custom_id")
    if not 0 < len(custom_id) <= 512:
        raise fields.wrong("custom_id", "1 to 512 characters are expected")
    fields.one_of("method", ("POST",), "")
    fields.one_of("url", (endpoint,), "")
    body = fields.needed("body")
    if body.flag("stream"):
        raise body.wrong("stream", "answers of a batch are not streamed", "unsupported_parameter")
    return custom_id, json.dumps(body.data, ensure_ascii=False)
