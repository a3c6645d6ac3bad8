"""OpenTelemetry traces: one for a session, at its client and its servers, and spans of the API's requests."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import trio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.api.engine.generation import ApiLimits
from petalnode.node.monitoring.traces import MISSING, Traces, exporters_of, traced
from petalnode.node.testing.memory_servers import MemoryServer, memory_swarm
from petalnode.protocols.ids import new_seed, trace_ids, traced_nonce
from petalnode.protocols.inference import NONCE_BYTES, session_name
from tests.memory_api import MemoryApi, memory_api
from tests.patience import eventually

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({}, ()),
        ({"OTEL_SERVICE_NAME": "anything"}, ()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, ("otlp_proto_http",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, ("otlp_proto_http",)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"}, ()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "TRUE"}, ()),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, ("otlp_proto_http", "console")),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ("otlp_proto_grpc",)),
    ],
    ids=lambda value: " ".join(value) or "none",
)
def test_the_environment_says_where_traces_go(variables: dict[str, str], names: tuple[str, ...]) -> None:
    assert exporters_of(variables) == names


def test_nonces_of_session_stand_for_one_trace() -> None:
    seed = new_seed()
    nonces = {traced_nonce(seed) for _ in range(8)}
    found = [trace_ids(nonce) for nonce in nonces]
    assert {len(nonce) for nonce in nonces} == {NONCE_BYTES}
    assert len({session_name(nonce) for nonce in nonces}) > 1  # in the servers' logs
    assert len({(ids.trace, ids.session) for ids in found}) == 1
    assert len({ids.hop for ids in found}) == len(nonces) > 1
    assert trace_ids(traced_nonce(new_seed())).trace != found[0].trace
    for nonce in (b"\0" * NONCE_BYTES, b"\xff" * NONCE_BYTES, b"\0" * 8 + seed):  # of clients that make no traces
        ids = trace_ids(nonce)
        assert (ids.session, ids.hop) == (0, 0)
        assert 0 < ids.trace < 1 << 128 and ids.trace != found[0].trace


def test_without_extra_node_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def made() -> bool:
        async with traced("server") as traces:
            return traces is not None

    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    with caplog.at_level(logging.WARNING, "petalnode.node.monitoring.traces"):
        assert not trio.run(made)
        assert not caplog.messages
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nobody-has-this")
        assert trio.run(made)
        assert "no exporter of traces 'nobody-has-this'" in caplog.messages[-1]
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
        assert not trio.run(made)
        assert caplog.messages[-1] == MISSING


def test_nothing_of_it_is_imported_unasked() -> None:
    code = (
        "import sys, petalnode.node.monitoring.traces as traces\n"
        "assert traces.exporters_of({}) == ()\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"


class Spans(InMemorySpanExporter):
    """What the nodes of a test have told."""

    def named(self, *names: str) -> list[ReadableSpan]:
        found = (span for span in self.get_finished_spans() if span.name in names)
        return sorted(found, key=lambda span: (span.attributes or {}).get("petalnode.first_block", 0))  # type: ignore[arg-type,return-value]


@pytest.fixture(scope="module")
def watched(api_model: Path) -> Iterator[tuple[MemoryApi, list[MemoryServer], Spans]]:
    """An API and two servers, all of which make traces."""
    spans = Spans()
    traces = Traces([spans], "of a test", at_once=True)
    with memory_swarm() as swarm:
        servers = [swarm.start(api_model, blocks, cache_tokens=20_000) for blocks in ("0:2", "2:6")]
        for server in servers:
            assert server.ready
            server.tallies.on_session = traces.served
        with memory_api(swarm, api_model, limits=ApiLimits(context=256, kept=0), traces=traces) as api:
            yield api, servers, spans


def wait_for(spans: Spans, *names: str, count: int) -> list[ReadableSpan]:
    async def told() -> bool:
        return len(spans.named(*names)) >= count

    trio.run(eventually, told, f"{count} spans of {names}")
    return spans.named(*names)


def test_request_and_its_session_at_client_and_servers(
    watched: tuple[MemoryApi, list[MemoryServer], Spans],
) -> None:
    api, servers, spans = watched
    spans.clear()
    asked: dict[str, Any] = {"prompt": "between us", "max_tokens": 5, "temperature": 0, "logit_bias": {"127": -100}}
    answer = httpx.post(f"{api.url}/v1/completions", json=asked, headers={"traceparent": PARENT}, timeout=None)
    assert answer.status_code == 200
    (request,) = wait_for(spans, "POST /v1/completions", count=1)
    assert request.parent is not None and request.context is not None
    assert f"{request.context.trace_id:032x}-{request.parent.span_id:016x}" in PARENT
    assert request.attributes is not None
    assert request.attributes["http.response.status_code"] == 200
    (choice,) = request.events
    assert choice.attributes is not None
    assert choice.attributes["gen_ai.usage.output_tokens"] == 5
    assert choice.attributes["petalnode.peer_ids"] == tuple(server.peer_id for server in servers)

    (session,) = wait_for(spans, "session", count=1)
    hops = spans.named("blocks 0:2", "blocks 2:6")
    served = wait_for(spans, "serve blocks 0:2", "serve blocks 2:6", count=2)
    assert session.context is not None and session.parent is None
    (link,) = request.links
    assert (link.context.trace_id, link.context.span_id) == (session.context.trace_id, session.context.span_id)
    assert {span.context.trace_id for span in (*hops, *served) if span.context} == {session.context.trace_id}
    for hop, at_server, server in zip(hops, served, servers, strict=True):
        assert hop.parent is not None and at_server.parent is not None and hop.context is not None
        assert hop.parent.span_id == session.context.span_id
        assert at_server.parent.span_id == hop.context.span_id
        assert (hop.kind, at_server.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
        assert hop.attributes is not None and at_server.attributes is not None
        assert hop.attributes["petalnode.peer_id"] == server.peer_id
        for name in ("petalnode.steps", "petalnode.tokens", "petalnode.first_block", "petalnode.blocks"):
            assert hop.attributes[name] == at_server.attributes[name]
        assert hop.attributes["petalnode.tokens"] == len(asked["prompt"]) + 4  # the last one is not sent
        assert hop.start_time is not None and hop.end_time is not None and hop.start_time <= hop.end_time
    written = "".join(span.to_json() for span in spans.get_finished_spans())
    assert "between us" not in written and answer.json()["choices"][0]["text"] not in written
    assert api.core.client.peer_id not in written


def test_routes_have_names_and_nobody_chooses_others(watched: tuple[MemoryApi, list[MemoryServer], Spans]) -> None:
    api, _, spans = watched
    spans.clear()
    assert httpx.get(f"{api.url}/v1/responses/resp-of-nobody", timeout=None).status_code == 404
    assert httpx.get(f"{api.url}/v1/made-up-by-a-stranger", timeout=None).status_code == 404
    assert httpx.get(f"{api.url}/v1/files/made-up-by-a-stranger", timeout=None).status_code == 404
    assert httpx.request("STRANGER", f"{api.url}/", timeout=None).status_code == 404
    assert httpx.get(f"{api.url}/v1/models", headers={"traceparent": "00-no"}, timeout=None).status_code == 200
    names = ("GET", "_OTHER", "GET /v1/responses/{name}", "GET /v1/files{rest}", "GET /v1/models")
    named = wait_for(spans, *names, count=5)
    assert {span.name for span in named} == set(names)
    assert "stranger" not in "".join(span.to_json() for span in spans.get_finished_spans())
    assert all(span.parent is None for span in named)


def test_client_without_traces_gets_one_at_each_server(
    watched: tuple[MemoryApi, list[MemoryServer], Spans], api_model: Path
) -> None:
    api, _, spans = watched
    spans.clear()
    with api.swarm.open_model(AutoDistributedModelForCausalLM, api_model) as model:
        model.generate(torch.arange(3, 9)[None], max_new_tokens=3, do_sample=False, pad_token_id=0)
    served = wait_for(spans, "serve blocks 0:2", "serve blocks 2:6", count=2)
    assert len({span.context.trace_id for span in served if span.context}) == 2
    assert all(span.parent is None and span.status.status_code is StatusCode.UNSET for span in served)
