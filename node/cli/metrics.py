"""The metrics of commands that run for long: their options, and the endpoint at which Prometheus reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from ..server.tallies import ServerTallies
from ..swarm.swarm import Swarm
from .option import option
from .output import Output

if TYPE_CHECKING:
    from ..monitoring.metrics import Metrics


@dataclass(frozen=True)
class MetricsOptions:
    """Where the metrics of a node are served."""

    metrics_port: int | None = option(
        None,
        "Serve metrics for Prometheus at http://127.0.0.1:PORT/metrics; 0 is any free port.",
        "PORT",
        min=0,
        max=65535,
    )
    metrics_host: str = option(
        "127.0.0.1", "Address for --metrics-port; everybody who reaches it can read the metrics.", "ADDRESS"
    )


@asynccontextmanager
async def metrics_served(options: MetricsOptions, output: Output) -> AsyncIterator[Metrics | None]:
    """Serves metrics for the length of the block, if that was asked for: those of the process, and what is added.

    Raises:
        MachineError: the port is taken, or this machine has no such address.
    """
    if options.metrics_port is None:
        yield None
        return
    # Imported only here: a node without metrics needs neither HTTP nor Prometheus' client.
    from ..api.http.server import listen, url_of
    from ..monitoring.endpoint import serve_metrics
    from ..monitoring.metrics import LoopDelay, Metrics, ProcessMetrics

    listeners = await listen(options.metrics_host, options.metrics_port, "--metrics-port")
    delay = LoopDelay()
    metrics = Metrics(ProcessMetrics(delay))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(delay.run)
        nursery.start_soon(serve_metrics, metrics, options.metrics_host, listeners)
        url = f"{url_of(options.metrics_host, listeners)}/metrics"
        output.say(f"metrics: {url}")
        output.emit(event="metrics", url=url)
        yield metrics
        nursery.cancel_scope.cancel()


def add_node(metrics: Metrics | None, swarm: Swarm, role: str) -> None:
    """From now on the metrics are those of this node, too."""
    if metrics is not None:
        from ..monitoring.metrics import NodeMetrics

        metrics.register(NodeMetrics(swarm, role))


def add_server(metrics: Metrics | None, swarm: Swarm, tallies: ServerTallies) -> None:
    """From now on the metrics are those of this server, too."""
    add_node(metrics, swarm, "server")
    if metrics is not None:
        from ..monitoring.metrics import ServerMetrics

        metrics.register(ServerMetrics(tallies))
