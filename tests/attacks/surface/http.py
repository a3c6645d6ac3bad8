"""The routes of `petalnode api`, and the fields of their requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .row import Row

BODY: Final = "node.api.fields.BODY.max_bytes node.api.http.server.HTTP.max_head node.api.http.server.HTTP.max_ahead"
TIME: Final = "node.api.fields.BODY.max_depth node.api.fields.BODY.bytes_per_value node.api.http.bodies._LARGE"
KEPT_FILES: Final = (
    "node.api.batches.store.BATCH_STORE.disk_bytes node.api.batches.store.BATCH_STORE.max_batches "
    "node.api.batches.store.BATCH_STORE.share"
)


def asked(
    *tests: str, entries: str = "node.api.parts.REQUEST_LIMITS.max_messages", fuzz: str = "request of the API"
) -> Row:
    """A route of `petalnode api`."""
    return Row("who has a key, or reaches the port", BODY, TIME, entries, tests, (fuzz,))


_API: Final = "tests/api/"
_HOSTILE: Final = f"{_API}test_hostile_requests.py"
_FULL: Final = "tests/attacks/test_full_share_at_api.py"
_BODIES: Final = "tests/attacks/test_large_bodies_at_api.py"
_BATCHES, _RESPONSES, _PICTURES = f"{_API}test_batches.py", f"{_API}test_responses.py", f"{_API}test_pictures.py"
RESPONSES: Final = "node.api.openai.endpoints.MAX_RESPONSES node.api.openai.endpoints.MAX_BYTES"
ROUTES: Final[Mapping[str, Row]] = {
    "GET /v1/models": asked("tests/attacks/test_web_page_at_api.py"),
    "GET /v1/models/{name:path}": asked("tests/attacks/test_web_page_at_api.py"),
    "POST /v1/chat/completions": asked(
        *(_HOSTILE, _BODIES, _PICTURES),
        entries="node.api.parts.REQUEST_LIMITS.max_messages node.api.parts.REQUEST_LIMITS.max_tools",
    ),
    "POST /v1/completions": asked(_HOSTILE, entries="node.api.openai.requests.MAX_CHOICES"),
    "GET /": asked(f"{_API}test_pages.py"),
    "GET /web/{name}": asked(f"{_API}test_pages.py"),
    "GET /metrics": asked("tests/unit/test_metrics.py"),
    "GET /v1/petalnode/swarm": asked("tests/swarm/test_links.py"),
    "GET /v1/petalnode/invite": asked("tests/swarm/test_links.py"),
    "GET /v1/petalnode/receipts/{name}": asked(f"{_API}test_request_options.py"),
    "POST /v1/petalnode/receipts/{name}/check": asked(f"{_API}test_receipts.py"),
    "POST /v1/petalnode/hidden_states": asked(_HOSTILE, entries="node.api.openai.endpoints._MAX_INPUTS"),
    "POST /v1/embeddings": asked(_HOSTILE, entries="node.api.openai.endpoints._MAX_INPUTS"),
    "POST /v1/responses": asked(_RESPONSES, entries=RESPONSES),
    "POST /v1/responses/input_tokens": asked(_RESPONSES),
    "GET /v1/responses/{name}": asked(_RESPONSES, entries=RESPONSES),
    "DELETE /v1/responses/{name}": asked(_RESPONSES, entries=RESPONSES),
    "GET /v1/responses/{name}/input_items": asked(_RESPONSES, entries=RESPONSES),
    "POST /v1/files": asked(_BATCHES, _FULL, entries=KEPT_FILES, fuzz="file of a batch"),
    "GET /v1/files": asked(_BATCHES, entries=KEPT_FILES),
    "GET /v1/files/{name}": asked(_BATCHES, entries=KEPT_FILES),
    "DELETE /v1/files/{name}": asked(_BATCHES, entries=KEPT_FILES),
    "GET /v1/files/{name}/content": asked(_BATCHES, entries=KEPT_FILES),
    "POST /v1/batches": asked(_BATCHES, entries=KEPT_FILES),
    "GET /v1/batches": asked(_BATCHES, entries=KEPT_FILES),
    "GET /v1/batches/{name}": asked(_BATCHES, entries=KEPT_FILES),
    "POST /v1/batches/{name}/cancel": asked(_BATCHES, entries=KEPT_FILES),
    "POST /v1/messages": asked(
        *(_HOSTILE, _PICTURES),
        entries="node.api.parts.REQUEST_LIMITS.max_messages node.api.parts.REQUEST_LIMITS.max_tools",
    ),
    "POST /v1/messages/count_tokens": asked(_HOSTILE),
    "GET /api/version": asked(f"{_API}test_ollama_client.py"),
    "GET /api/tags": asked(f"{_API}test_ollama_client.py"),
    "GET /health": asked(f"{_API}test_ollama_client.py"),
    "GET /api/ps": asked(f"{_API}test_ollama_client.py"),
    "POST /api/pull": asked(f"{_API}test_ollama_client.py"),
    "POST /api/embed": asked(f"{_API}test_ollama_client.py"),
    "POST /api/embeddings": asked(f"{_API}test_ollama_client.py"),
    "POST /api/show": asked(f"{_API}test_ollama_client.py"),
    "POST /api/chat": asked(f"{_API}test_ollama_client.py", _PICTURES),
    "POST /api/generate": asked(f"{_API}test_ollama_client.py", _PICTURES),
}

FIELDS: Final[Mapping[str, str]] = {
    "node.api.http.server.HTTP.max_head": """access-control-request-headers authorization content-length host origin
        x-api-key after limit order tokens""",
    "node.api.openai.requests.MAX_CHOICES": "prompt guided_choice",
    "node.api.openai.endpoints._MAX_INPUTS": "blocks input",
    "node.api.parts.REQUEST_LIMITS.max_messages": "content messages system instructions text tool_calls tool_result",
    "node.api.parts.REQUEST_LIMITS.max_grammar_characters": """format guided_json guided_regex response_format
    json_schema schema
        output_config""",
    "node.api.parts.REQUEST_LIMITS.max_tools": """tool_choice function parameters input_schema parallel_tool_calls
    tool_name
        tool_call_id tool_use_id call_id""",
    "node.api.parts.REQUEST_LIMITS.max_metadata": "metadata",
    "node.blocks.images.pictures.PICTURES.nbytes": "image_url url source data",
    "node.blocks.images.pictures.PICTURES.count": "images",
    "node.client.generation.sampling.MAX_BIASES": "logit_bias",
    "node.api.fields.BODY.max_depth": "arguments options body x_petalnode stream_options thinking reasoning",
    "node.api.batches.endpoints.UPLOADS.max_name": "custom_id file input_file_id purpose",
    # Texts that are compared with what there is: as long as a body may be.
    "node.api.fields.BODY.max_bytes": """adapter description draft id model modalities name previous_response_id
        state store stream strict type request_id headers more_body hidden_size model_type""",
}
"""By its bound, which fields of requests are read as they are, without a range in the reading itself."""
