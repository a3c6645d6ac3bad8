"""The metrics of `petalnode api`: GET /metrics beside its endpoints, with the same keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from .metrics import ClientMetrics, LoopDelay, Metrics, MetricSource, NodeMetrics, ProcessMetrics, buckets, counters

_REASONS: Final = ("stop", "length", "failed")
_TOKENS: Final = ("prompt", "cached", "completion")


class MetricsEndpoint:
    """GET /metrics: of the node, its process, its sessions and its answers. `delay` has to be run."""

    def __init__(self, swarm: Swarm, core: Core, delay: LoopDelay) -> None:
        self._metrics = Metrics(
            ProcessMetrics(delay),
            NodeMetrics(swarm, "api"),
            ClientMetrics(core.client.state.totals),
            ApiMetrics(core.tallies),
        )

    @property
    def route(self) -> BaseRoute:
        return Route("/metrics", self._get, methods=["GET"])

    async def _get(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@dataclass(frozen=True, eq=False)
class ApiMetrics(MetricSource):
    """Of what was answered."""

    tallies: ApiTallies

    def collect(self) -> Iterator[Metric]:
        yield counters(
            "petalnode_api_answers",
            "Choices that have ended, by the reason.",
            "reason",
            {reason: self.tallies.answers[reason] for reason in _REASONS},
        )
        yield counters(
            "petalnode_api_tokens",
            "Tokens of answers, and of prompts: those computed, and those whose cache was kept.",
            "kind",
            {kind: self.tallies.tokens[kind] for kind in _TOKENS},
        )
        first = self.tallies.first_token
        yield HistogramMetricFamily(
            "petalnode_api_first_token_seconds",
            "From the begin of a choice to its first token.",
            buckets=buckets(WAIT_BOUNDS, first.buckets),
            sum_value=first.total,
        )
