"""The metrics of `petalnode api`: GET /metrics beside its endpoints, with the same keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..api.engine.core import Core
from ..api.engine.generation import ApiTallies
from ..client.deadlines import WAIT_BOUNDS
from ..swarm.swarm import Swarm
from .metrics import Metrics, Source, buckets, client_metrics, counters, node_metrics, process_metrics
from .process import LoopDelay

_REASONS: Final = ("stop", "length", "failed")
_TOKENS: Final = ("prompt", "cached", "completion")


def metrics_route(swarm: Swarm, core: Core, delay: LoopDelay) -> BaseRoute:
    """GET /metrics: of the node, its process, its sessions and its answers. `delay` has to be run."""
    metrics = Metrics(
        process_metrics(delay),
        node_metrics(swarm, "api"),
        client_metrics(core.client.totals),
        api_metrics(core.tallies),
    )

    async def get(request: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return Route("/metrics", get, methods=["GET"])


def api_metrics(tallies: ApiTallies) -> Source:
    """Of what was answered."""

    def collect() -> Iterator[Metric]:
        yield counters(
            "petalnode_api_answers",
            "Choices that have ended, by the reason.",
            "reason",
            {reason: tallies.answers[reason] for reason in _REASONS},
        )
        yield counters(
            "petalnode_api_tokens",
            "Tokens of answers, and of prompts: those computed, and those whose cache was kept.",
            "kind",
            {kind: tallies.tokens[kind] for kind in _TOKENS},
        )
        first = tallies.first_token
        yield HistogramMetricFamily(
            "petalnode_api_first_token_seconds",
            "From the begin of a choice to its first token.",
            buckets=buckets(WAIT_BOUNDS, first.buckets),
            sum_value=first.total,
        )

    return collect
