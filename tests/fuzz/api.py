"""Targets of `petalnode api`: bodies of requests in every dialect, and files of batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from petalnode.node.api import ollama as ollama
from petalnode.node.api.anthropic import parse_messages
from petalnode.node.api.batches.objects import ENDPOINTS, batch_object, read_input
from petalnode.node.api.batches.store import StoredBatch
from petalnode.node.api.errors import ApiError, error_object
from petalnode.node.api.fields import Fields, parse_object
from petalnode.node.api.openai.requests import parse_chat, parse_completion
from petalnode.node.api.openai.responses import parse_response
from petalnode.node.errors import BadInput
from tests.api.bodies import BODIES
from tests.fuzz.files import as_json
from tests.fuzz.harness import Target, parser
from tests.fuzz.mutation import Mutator

_PARSERS: Final[dict[str, Callable[[Fields], Any]]] = {
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
    "/v1/responses": parse_response,
    "/v1/messages": parse_messages,
    "/api/chat": ollama.parse_chat,
    "/api/generate": ollama.parse_generate,
}


def _body(mutator: Mutator) -> tuple[str, bytes]:
    path = mutator.random.choice(list(_PARSERS))
    return path, as_json(mutator, BODIES[path])


def _read_body(given: tuple[str, bytes]) -> None:
    """What is refused is told as JSON."""
    path, body = given
    try:
        _PARSERS[path](parse_object(body))
    except ApiError as error:
        if error.status != 400:
            raise AssertionError(f"{error.status}: {error}") from error
        json.dumps(error_object(error, path), ensure_ascii=False, allow_nan=False).encode()


def _batch_file(mutator: Mutator) -> bytes:
    lines = [
        as_json(mutator, {"custom_id": str(number), "method": "POST", "url": path, "body": BODIES[path]})
        for number, path in enumerate(mutator.random.choices(ENDPOINTS, k=3))
    ]
    return mutator.bytes(b"\n".join(lines))


def _read_batch(content: bytes) -> None:
    requests, faults = read_input(content, ENDPOINTS[0], 100)
    assert not requests or not faults
    for _, _, body in requests:
        body.encode()
    fields = {"errors": [fault.fields() for fault in faults]}
    told = batch_object(StoredBatch("a", "b", ENDPOINTS[0], "c", "failed", 0, fields))
    json.dumps(told, ensure_ascii=False, allow_nan=False).encode()


TARGETS: Final[tuple[Target, ...]] = (
    parser("request of the API", 12, _body, _read_body, BadInput),
    parser("file of a batch", 3, _batch_file, _read_batch),
)
