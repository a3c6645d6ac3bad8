"""Requests with all fields that an interface knows, and values that no field expects."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, Final

MODEL: Final = "tiny-llama"
PLACE: Final = {
    "type": "object",
    "properties": {"where": {"enum": ["here", "there"]}},
    "required": ["where"],
    "additionalProperties": False,
}
"""The arguments of a tool that wants to know where."""
_SCHEMA: Final = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 1}}}
_SAMPLING: Final[dict[str, Any]] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "n": 1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"1": 2, "3": -1.5},
}
_OPTIONS: Final = {"x_petalnode": {"compare_chains": 1, "draft": "auto", "adapter": "", "trusted_blocks": 2}}
_FUNCTION: Final = {"name": "f", "description": "", "parameters": _SCHEMA}
_CALL: Final = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}

BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        "model": MODEL,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "include_progress": False},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        **_SAMPLING,
        **_OPTIONS,
        "tools": [{"type": "function", "function": _FUNCTION}],
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "a"},
            {"role": "user", "content": "a", "name": "x"},
        ],
    },
    "/v1/completions": {
        "model": MODEL,
        "prompt": [[1, 2], [3]],
        "max_tokens": 1,
        "echo": False,
        "best_of": 1,
        "logprobs": 1,
        "stop": "x",
        "guided_regex": "a+",
        "stream": False,
        **_SAMPLING,
        **_OPTIONS,
    },
    "/v1/responses": {
        "model": MODEL,
        "max_output_tokens": 1,
        "top_logprobs": 1,
        "stream": False,
        "instructions": "a",
        "include": ["message.output_text.logprobs"],
        "truncation": "disabled",
        "metadata": {"a": "b"},
        "store": True,
        "parallel_tool_calls": True,
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "text"}},
        "tools": [{"type": "function", **_FUNCTION}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "a"},
        ],
        **_SAMPLING,
        **_OPTIONS,
    },
    "/v1/responses/input_tokens": {"model": MODEL, "input": "a"},
    "/v1/messages": {
        "model": MODEL,
        "max_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stream": False,
        "stop_sequences": ["x"],
        "thinking": {"type": "disabled"},
        "system": [{"type": "text", "text": "a"}],
        "tools": [{"name": "f", "description": "", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "a"}]},
        ],
        **_OPTIONS,
    },
    "/v1/messages/count_tokens": {"model": MODEL, "messages": [{"role": "user", "content": "a"}]},
    "/api/chat": {
        "model": MODEL,
        "stream": False,
        "logprobs": True,
        "top_logprobs": 1,
        "think": False,
        "keep_alive": 5,
        "options": {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "seed": 1,
            "num_predict": 1,
            "stop": ["x"],
            "repeat_penalty": 1.1,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
        },
        "tools": [{"type": "function", "function": _FUNCTION}],
        "messages": [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
            {"role": "tool", "tool_name": "f", "content": "a"},
        ],
        **_OPTIONS,
    },
    "/api/generate": {
        "model": MODEL,
        "prompt": "a",
        "system": "a",
        "raw": True,
        "format": "",
        "options": {"num_predict": 1},
        "stream": False,
        **_OPTIONS,
    },
    "/api/embed": {"model": MODEL, "input": ["some", "text"]},
    "/api/embeddings": {"model": MODEL, "prompt": "some"},
    "/api/show": {"model": MODEL},
    "/api/pull": {"model": MODEL, "stream": False},
    "/v1/embeddings": {"model": MODEL, "input": ["a", [1, 2]], "encoding_format": "float", "pooling": "mean"},
    "/v1/petalnode/hidden_states": {"model": MODEL, "input": [1, 2], "blocks": [0, 5], **_OPTIONS},
}

_HUGE: Final = "@huge@"
STRANGE: Final[tuple[Any, ...]] = (
    *(None, True, -1, 0, 2**31, -(2**63), 2**64, 10**400, -(10**400), 1e-320, 5e-324, 1e308, -1e308, 0.5, -0.0),
    *("", "x", "\x00\x1b]52;c;YQ==\x07", "ü" * 500, "1e999", "٣", "\ud800", _HUGE),
    *([], [[]], [None], [1e308], ["a", 1], [10**400], [True], [-1], {}, {"\ud800": 1}, {"": {}}, {"type": 10**400}),
    *({"1": 10**400}, {"type": "json_schema", "schema": {"minimum": 10**400}}, [{"type": "text"}], "auto", "\udfff"),
)


def encoded(body: Any) -> bytes:
    """As JSON; what stands for a number that no float holds is one."""
    import json

    return json.dumps(body).replace(f'"{_HUGE}"', "1e999").encode()


def places(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a body, and the body itself."""
    yield path
    for key, inner in body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ():
        yield from places(inner, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The body with another value at this place."""
    if not path:
        return value
    body = deepcopy(body)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return body
