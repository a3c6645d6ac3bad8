"""The HTTP endpoint at which a node's metrics are read: one page, nothing that changes the node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from ..api.http.server import LOOPBACK, HttpLimits, host_name, serve_http
from .metrics import Metrics

_LIMITS: Final = HttpLimits(connections=16)
_NOT_FOUND: Final = b"there is nothing here but /metrics\n"
_OTHER_HOST: Final = b"this endpoint does not answer for that host\n"


@dataclass(frozen=True)
class MetricsApplication:
    """An ASGI application that answers GET /metrics in Prometheus' text format.

    `hosts` are the names by which it may be asked; none for any. A web page whose name is made to mean 127.0.0.1 (DNS
    rebinding) could else read it.
    """

    metrics: Metrics
    hosts: frozenset[str] = frozenset()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        host = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
        kind = b"text/plain; charset=utf-8"
        if self.hosts and host_name(host) not in self.hosts:
            status, body = 403, _OTHER_HOST
        elif scope["path"] != "/metrics" or scope["method"] not in ("GET", "HEAD"):
            status, body = 404, _NOT_FOUND
        else:
            status, body, kind = 200, generate_latest(self.metrics), CONTENT_TYPE_PLAIN_0_0_4.encode()
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def serve_metrics(metrics: Metrics, host: str, listeners: Sequence[trio.SocketListener]) -> None:
    """Serves the page until cancelled."""
    hosts = LOOPBACK if host in LOOPBACK else frozenset[str]()
    await serve_http(MetricsApplication(metrics, hosts), listeners, _LIMITS)
