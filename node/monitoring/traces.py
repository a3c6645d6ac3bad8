"""OpenTelemetry traces of sessions and of the API's requests, where the environment asks for them (`OTEL_*`).

Nothing of OpenTelemetry is imported before that is known; it comes with the extra `traces`. Spans are made when what
they tell of is over. So a step costs a few additions, and a session one span for each server. No span holds a text, a
token, or a client's peer id.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, cast

import trio

from ...protocols.ids import trace_ids
from ..version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ..api.engine.generation import Finished
    from ..client.session.trace import HopTrace, SessionTrace
    from ..server.tallies import ServedSession

log = logging.getLogger(__name__)

MISSING: Final = "the environment asks for traces (OTEL_...), which need: pip install 'petalnode[traces]'"
FLUSH_SECONDS: Final = 3.0
"""For the last spans to leave when a command ends."""
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"))
_OTLP: Final = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


def exporters_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The entry points (group `opentelemetry_traces_exporter`) of the exporters that are asked for; empty for none.

    By `OTEL_TRACES_EXPORTER`, a list of names, or by an endpoint for OTLP alone. OpenTelemetry's default, to send to
    localhost, would be no default for a node.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    default = "otlp" if any(environment.get(name) for name in endpoints) else "none"
    names = [name.strip() for name in (environment.get("OTEL_TRACES_EXPORTER") or default).split(",")]
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    otlp = _OTLP.get(protocol or "http/protobuf", "otlp_proto_http")
    return tuple(otlp if name == "otlp" else name for name in names if name not in ("", "none"))


@asynccontextmanager
async def traced(role: str) -> AsyncIterator[Traces | None]:
    """Traces of a command (`api`, `server`) for the length of the block; None if nobody asks for them."""
    names = exporters_of(os.environ)
    try:
        traces = Traces(_exporters(names), role) if names else None
    except ImportError:
        log.warning(MISSING)
        traces = None
    try:
        yield traces
    finally:
        if traces is not None:
            with trio.CancelScope(shield=True), trio.move_on_after(FLUSH_SECONDS):
                await trio.to_thread.run_sync(traces.end, abandon_on_cancel=True)


def _exporters(names: tuple[str, ...]) -> list[SpanExporter]:
    """Raises ImportError if OpenTelemetry's SDK is not there."""
    import opentelemetry.sdk.trace  # noqa: F401

    found = []
    for name in names:
        points = entry_points(group="opentelemetry_traces_exporter", name=name)
        if not points:
            log.warning("there is no exporter of traces %r: install it, or correct OTEL_TRACES_EXPORTER", name[:100])
            continue
        try:
            found.append(next(iter(points)).load()())
        except Exception as error:  # of a package that nobody here knows
            log.warning("the exporter of traces %r cannot be used: %s", name[:100], error)
    return found


class Traces:
    """Makes spans, and hands them to exporters in a thread of its own, through a queue that is bounded.

    Raises:
        ImportError: OpenTelemetry's SDK is not there.
    """

    def __init__(self, exporters: list[SpanExporter], role: str, *, at_once: bool = False) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        said = OTELResourceDetector().detect().attributes
        resource = Resource.create({"service.name": f"petalnode-{role}", "service.version": __version__, **said})
        self._ids = ChosenIds()
        self._provider = TracerProvider(resource=resource, id_generator=cast(Any, self._ids), shutdown_on_exit=False)
        for exporter in exporters:
            make = SimpleSpanProcessor if at_once else BatchSpanProcessor
            self._provider.add_span_processor(make(exporter))
        self._tracer = self._provider.get_tracer("petalnode", __version__)

    def end(self) -> None:
        """Sends what is left; takes as long as the exporters do."""
        self._provider.force_flush(round(1000 * FLUSH_SECONDS))
        self._provider.shutdown()

    # --- sessions

    def session(self, session: SessionTrace) -> None:
        """A session of this client: a span for it, and one for each of its servers."""
        ids = session.ids
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.model": session.model,
            "petalnode.recoveries": session.recoveries,
            "petalnode.servers": len(session.hops),
        }
        with self._ids.chosen(ids.trace, ids.session):
            span = self._tracer.start_span(
                "session", self._root(), start_time=_ns(session.begun), attributes=attributes
            )
        if session.failed:
            span.set_status(_error())
        for hop in session.hops:
            self._hop(hop)
        span.end(_ns(session.ended))

    def _hop(self, hop: HopTrace) -> None:
        from opentelemetry.trace import SpanKind

        ids = trace_ids(hop.nonce)
        attributes: dict[str, str | int | float] = {
            "petalnode.peer_id": hop.hop.peer_id,
            "petalnode.first_block": hop.hop.span.start,
            "petalnode.blocks": len(hop.hop.span),
            "petalnode.steps": hop.steps,
            "petalnode.tokens": hop.tokens,
            "petalnode.wait_seconds": hop.waited,
            "petalnode.queue_seconds": hop.queue,
            "petalnode.compute_seconds": hop.compute,
            "petalnode.bytes_sent": hop.bytes_sent,
            "petalnode.bytes_received": hop.bytes_received,
        }
        with self._ids.chosen(ids.trace, ids.hop):
            span = self._tracer.start_span(
                f"blocks {hop.hop.span}",
                self._below(ids.trace, ids.session),
                SpanKind.CLIENT,
                start_time=_ns(hop.begun),
                attributes=attributes,
            )
        span.end(_ns(hop.ended))

    def served(self, session: ServedSession) -> None:
        """A session that this server has served, below the client's span for this server if the client makes traces."""
        from opentelemetry.trace import SpanKind

        ids = trace_ids(session.nonce)
        attributes: dict[str, str | int | float] = {
            "petalnode.first_block": session.span.start,
            "petalnode.blocks": len(session.span),
            "petalnode.rows": session.batch,
            "petalnode.steps": session.steps,
            "petalnode.tokens": session.tokens,
            "petalnode.queue_seconds": session.queue,
            "petalnode.compute_seconds": session.compute,
        }
        with self._ids.chosen(ids.trace, 0):
            span = self._tracer.start_span(
                f"serve blocks {session.span}",
                self._below(ids.trace, ids.hop) if ids.hop else self._root(),
                SpanKind.SERVER,
                start_time=_ns(session.begun),
                attributes=attributes,
            )
        if session.refusal:
            span.set_status(_error(session.refusal))
        span.end(_ns(session.ended))

    def _root(self) -> Any:
        from opentelemetry.context import Context

        return Context()

    def _below(self, trace: int, span: int) -> Any:
        """The context of a span that another process may have made, which was sampled if this one would do so: samplers
        by ratio decide by the id of the trace alone."""
        from opentelemetry.context import Context
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        decided = self._provider.sampler.should_sample(Context(), trace, "session").decision
        flags = TraceFlags(TraceFlags.SAMPLED if decided is Decision.RECORD_AND_SAMPLE else TraceFlags.DEFAULT)
        parent = NonRecordingSpan(SpanContext(trace, span, is_remote=True, trace_flags=flags))
        return set_span_in_context(parent, Context())

    # --- requests of the API

    def application(self, application: ASGIApp) -> ASGIApp:
        """`application`, with a span for every request, in the trace that its `traceparent` names."""
        return partial(self._trace_request, application)

    async def _trace_request(self, application: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        with self._request(scope) as span:
            await application(scope, receive, partial(_send_noting_status, span, send))

    @contextmanager
    def _request(self, scope: Scope) -> Iterator[Span]:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, use_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = TraceContextTextMapPropagator().extract(headers, Context())
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        span = self._tracer.start_span(method, parent, SpanKind.SERVER)
        span.set_attribute("http.request.method", method)
        try:
            with use_span(span, record_exception=False, set_status_on_exception=False):
                yield span
        finally:
            route = _route(scope)
            if route:
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)
            span.end()

    def answered(self, model: str, end: Finished, session: SessionTrace | None) -> None:
        """A choice of the request that this task belongs to has ended; its session goes on, or ends soon."""
        from opentelemetry.trace import SpanContext, get_current_span

        span = get_current_span()
        if session is not None:
            span.add_link(SpanContext(session.ids.trace, session.ids.session, is_remote=False))
        span.set_attribute("gen_ai.request.model", model)
        span.add_event("choice", _choice_attributes(end))


def _choice_attributes(end: Finished) -> dict[str, Any]:
    return {
        "gen_ai.response.finish_reason": end.reason,
        "gen_ai.usage.input_tokens": end.prompt_tokens,
        "gen_ai.usage.output_tokens": end.tokens,
        "petalnode.cached_tokens": end.cached,
        "petalnode.recoveries": end.recoveries,
        "petalnode.peer_ids": [hop.peer_id for hop in end.hops],
        "petalnode.last_step_ms": [hop.milliseconds for hop in end.hops],
    }


def _route(scope: Scope) -> str:
    """The path, names in the place of what clients choose; empty if it is none that there is."""
    if "endpoint" not in scope:
        return ""
    path = str(scope["path"])
    for name, value in scope.get("path_params", {}).items():
        slash = "/" if f"/{value}" in path else ""
        before, found, after = path.rpartition(f"{slash}{value}") if value else (path, "", "")
        path = f"{before}{slash}{{{name}}}{after}" if found else path
    return path


def _error(text: str | None = None) -> Any:
    from opentelemetry.trace import Status, StatusCode

    return Status(StatusCode.ERROR, text)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


async def _send_noting_status(span: Span, send: Send, message: Message) -> None:
    if message["type"] == "http.response.start":
        span.set_attribute("http.response.status_code", message["status"])
        if message["status"] >= 500:
            span.set_status(_error())
    await send(message)


class ChosenIds:
    """OpenTelemetry's own generator of ids, but for ids that are chosen for one span."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        self._random = RandomIdGenerator()
        self._trace = self._span = 0

    @contextmanager
    def chosen(self, trace: int, span: int) -> Iterator[None]:
        """Ids of the spans that are made in the block; 0 is any. The block must not wait."""
        self._trace, self._span = trace, span
        try:
            yield
        finally:
            self._trace = self._span = 0

    def generate_trace_id(self) -> int:
        return self._trace or self._random.generate_trace_id()

    def generate_span_id(self) -> int:
        return self._span or self._random.generate_span_id()

    def is_trace_id_random(self) -> bool:
        return self._random.is_trace_id_random()
