"""The metrics of a node by Prometheus' conventions, made of the counts of its parts when somebody asks.

No label has a value that a peer can choose: none is a peer's id, a session's or an address.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import psutil
import trio
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from ..client.deadlines import WAIT_BOUNDS, SessionTotals
from ..network.nat.reachability import KINDS
from ..server.tallies import STATES, Distribution, ServerTallies, Serving, StepTallies
from ..swarm.swarm import Swarm
from ..version import __version__

INTERVAL: Final = 0.25
WINDOW: Final = 10.0
"""Seconds that `LoopDelay.longest` looks back."""
_BOUNDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class LoopDelay:
    """Measures how much later than due a task of the event loop wakes up: for so long everybody waited.

    Attributes:
        seconds: all that was measured so far.
    """

    def __init__(self) -> None:
        self.seconds = Distribution(_BOUNDS)
        self._recent: deque[tuple[float, float]] = deque(maxlen=round(WINDOW / INTERVAL))  # when, and how late

    async def run(self) -> None:
        """Measures four times a second until cancelled, which takes less than 0.1 % of a core."""
        while True:
            due = trio.current_time() + INTERVAL
            await trio.sleep_until(due)
            now = trio.current_time()
            self.note(now, now - due)

    def note(self, now: float, late: float) -> None:
        """At `now` a task has woken up `late` seconds later than due."""
        self.seconds.add(max(0.0, late))
        self._recent.append((now, late))

    def longest(self, now: float) -> float:
        """The longest delay of the last ten seconds."""
        return max((late for at, late in self._recent if now - at <= WINDOW), default=0.0)


@dataclass(frozen=True)
class ProcessFigures:
    """Of this process, since it started where that applies; None where the system does not tell."""

    cpu_seconds: float
    resident_bytes: int
    virtual_bytes: int
    started: float
    threads: int
    open_files: int | None


def process_figures(process: psutil.Process) -> ProcessFigures:
    """Takes less than a millisecond."""
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info()
        try:
            open_files = process.num_fds() if hasattr(process, "num_fds") else None
        except psutil.Error:
            open_files = None
        return ProcessFigures(
            times.user + times.system, memory.rss, memory.vms, process.create_time(), process.num_threads(), open_files
        )


VERDICTS: Final = ("ok", "faulty", "inconclusive")


class MetricSource(Collector):
    """Some of the metrics of a node."""

    def describe(self) -> Iterable[Metric]:
        return ()  # asked at registration, when there may be nothing to ask

    def collect(self) -> Iterator[Metric]:
        """Raises nothing."""
        raise NotImplementedError


class Metrics(CollectorRegistry):
    """All metrics of one node."""

    def __init__(self, *sources: MetricSource) -> None:
        super().__init__(auto_describe=False)
        for source in sources:
            self.register(source)


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus has them."""
    found, total = [], 0
    for bound, count in zip([*map(float, bounds), float("inf")], counts, strict=True):
        total += count
        found.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
    return found


def histogram(name: str, text: str, values: Distribution) -> Metric:
    return HistogramMetricFamily(name, text, buckets=buckets(values.bounds, values.buckets), sum_value=values.total)


def histograms(name: str, text: str, values: Mapping[str, Distribution]) -> Metric:
    """By kind."""
    family = HistogramMetricFamily(name, text, labels=["kind"])
    for key, value in values.items():
        family.add_metric([key], buckets(value.bounds, value.buckets), value.total)
    return family


# --- every node


@dataclass(frozen=True, eq=False)
class ProcessMetrics(MetricSource):
    """Of the process and its event loop; `delay` has to be run."""

    delay: LoopDelay
    process: psutil.Process = field(default_factory=psutil.Process)

    def collect(self) -> Iterator[Metric]:
        figures = process_figures(self.process)
        yield counter("process_cpu_seconds", "Processor time, user and system.", figures.cpu_seconds)
        yield gauge("process_resident_memory_bytes", "Resident memory.", figures.resident_bytes)
        yield gauge("process_virtual_memory_bytes", "Virtual memory.", figures.virtual_bytes)
        yield gauge("process_start_time_seconds", "Start of the process, seconds since 1970.", figures.started)
        yield gauge("process_threads", "Threads.", figures.threads)
        if figures.open_files is not None:
            yield gauge("process_open_fds", "Open file descriptors.", figures.open_files)
        yield histogram(
            "petalnode_event_loop_delay_seconds",
            "How much later than due a task of the event loop woke up, measured four times a second.",
            self.delay.seconds,
        )
        yield gauge(
            "petalnode_event_loop_delay_max_seconds",
            f"The longest of these delays in the last {WINDOW:.0f} seconds.",
            self.delay.longest(trio.current_time()),
        )


@dataclass(frozen=True, eq=False)
class NodeMetrics(MetricSource):
    """Of connections, bytes, reachability, relaying, and what is known of others."""

    swarm: Swarm
    role: str

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("petalnode_build_info", "Version and role of this node.", labels=["version", "role"])
        info.add_metric([__version__, self.role], 1)
        yield info
        yield from _connections(self.swarm)
        yield from _traffic(self.swarm)
        kind = self.swarm.reachability.kind
        yield gauges(
            "petalnode_reachability",
            "How others reach this node: 1 for the kind that holds.",
            "kind",
            {name: float(name == kind) for name in KINDS},
        )
        yield from _relay(self.swarm)
        yield gauge(
            "petalnode_known_servers", "Servers whose announcements this node holds.", len(self.swarm.view.records)
        )
        yield gauge("petalnode_banned_servers", "Servers that this node does not use.", len(self.swarm.trust.bans()))
        yield gauge(
            "petalnode_message_memory_bytes",
            "Memory for messages received in part or worked with.",
            self.swarm.received.taken + self.swarm.received_ungranted.taken,
        )


def _connections(swarm: Swarm) -> Iterator[Metric]:
    found = Counter(
        ("direct" if path.direct else "relayed", "inbound" if path.inbound else "outbound")
        for peer_id in swarm.connected()
        for path in swarm.host.paths(peer_id)
    )
    family = GaugeMetricFamily("petalnode_connections", "Open connections to peers.", labels=["path", "direction"])
    for path in ("direct", "relayed"):
        for direction in ("inbound", "outbound"):
            family.add_metric([path, direction], found[path, direction])
    yield family
    yield gauge("petalnode_connected_peers", "Peers with a connection.", len(swarm.connected()))


def _traffic(swarm: Swarm) -> Iterator[Metric]:
    sockets, streams = swarm.host.socket_bytes, swarm.host.traffic.by_protocol
    yield counter("petalnode_socket_sent_bytes", "Bytes sent on all sockets to peers.", sockets.sent)
    yield counter("petalnode_socket_received_bytes", "Bytes received on all sockets to peers.", sockets.received)
    yield counters(
        "petalnode_protocol_sent_bytes",
        "Bytes sent on streams, by protocol; what a circuit carries counts for both.",
        "protocol",
        {protocol: count.sent for protocol, count in sorted(streams.items())},
    )
    yield counters(
        "petalnode_protocol_received_bytes",
        "Bytes received on streams, by protocol; what a circuit carries counts for both.",
        "protocol",
        {protocol: count.received for protocol, count in sorted(streams.items())},
    )


def _relay(swarm: Swarm) -> Iterator[Metric]:
    relay = swarm.nat.relay.stats
    yield gauge("petalnode_relay_reservations", "Peers that have a reservation here.", relay.reservations)
    yield gauge("petalnode_relay_circuits", "Circuits that this node carries.", relay.circuits)
    yield counter("petalnode_relay_circuits_opened", "Circuits that this node has made.", relay.circuits_made)
    yield counter("petalnode_relay_refusals", "Reservations and circuits that were refused.", relay.refused)
    yield counter("petalnode_relay_carried_bytes", "Bytes that this node has relayed.", relay.bytes_relayed)


# --- servers


@dataclass(frozen=True, eq=False)
class ServerMetrics(MetricSource):
    """Of what a server has computed, and what it holds now."""

    tallies: ServerTallies

    def collect(self) -> Iterator[Metric]:
        serving = self.tallies.serving() if self.tallies.serving is not None else None
        yield from _serving(serving)
        yield from _work(self.tallies)


def _serving(serving: Serving | None) -> Iterator[Metric]:
    state = "loading" if serving is None else serving.state
    yield gauges(
        "petalnode_server_state",
        "State of the server: 1 for the one that holds.",
        "state",
        {name: float(name == state) for name in STATES},
    )
    if serving is None:
        return
    info = GaugeMetricFamily(
        "petalnode_server_info",
        "The model that is served, and how.",
        labels=["model", "dtype", "quantisation", "device"],
    )
    info.add_metric([serving.model, serving.dtype, serving.quantisation, serving.device], 1)
    yield info
    yield gauge("petalnode_server_first_block", "The first block held here.", serving.span.start)
    yield gauge("petalnode_server_blocks", "Blocks held here.", len(serving.span))
    yield gauge("petalnode_server_model_blocks", "Blocks of the model.", serving.num_blocks)
    yield gauge("petalnode_server_sessions", "Open sessions, and those that wait for cache.", serving.sessions)
    yield gauge("petalnode_server_batch_streams", "Open streams of training batches.", serving.batch_streams)
    yield gauge("petalnode_server_cache_capacity_tokens", "Size of the attention cache.", serving.cache_capacity)
    yield gauge(
        "petalnode_server_cache_used_tokens",
        "Attention cache that sessions have reserved.",
        serving.cache_capacity - serving.cache_free,
    )
    yield gauge("petalnode_server_cache_waiting_sessions", "Sessions that wait for cache.", serving.waiting)
    yield gauge("petalnode_server_queue_length", "Steps and calls that wait or run.", serving.queue_depth)
    yield gauge(
        "petalnode_server_announced_steps_per_second",
        "Decode steps of one row per second, as announced.",
        serving.steps_per_second,
    )
    used, read = serving.experts
    yield counter("petalnode_server_experts_used", "Experts that were used, once for each pass through a block.", used)
    yield counter("petalnode_server_experts_read", "Those of them that were not in memory.", read)


def _work(tallies: ServerTallies) -> Iterator[Metric]:
    kinds: dict[str, StepTallies] = {"decode": tallies.decode, "prefill": tallies.prefill}
    yield counters(
        "petalnode_server_steps",
        "Steps of sessions that were computed.",
        "kind",
        {kind: steps.steps for kind, steps in kinds.items()},
    )
    yield counters(
        "petalnode_server_tokens",
        "Tokens of sessions that were computed through this server's blocks.",
        "kind",
        {kind: steps.tokens for kind, steps in kinds.items()},
    )
    yield histogram(
        "petalnode_server_batch_rows", "Rows of decode steps that were computed together.", tallies.batch_rows
    )
    yield histograms(
        "petalnode_server_queue_seconds",
        "From a step's arrival to the turn in which it began.",
        {kind: steps.queue for kind, steps in kinds.items()},
    )
    yield histograms(
        "petalnode_server_compute_seconds",
        "Time of a step on the device.",
        {kind: steps.compute for kind, steps in kinds.items()},
    )
    yield counter("petalnode_server_sessions_opened", "Sessions that were granted.", tallies.sessions_opened)
    yield counters(
        "petalnode_server_refusals",
        "Sessions, steps and batches that were refused, by the protocol's error code.",
        "code",
        {code.removeprefix("ERROR_").lower(): count for code, count in sorted(tallies.refusals.items())},
    )
    for name, text, counts in (
        ("petalnode_server_batches", "Training batches that were computed.", tallies.batches),
        ("petalnode_server_batch_tokens", "Tokens of training batches.", tallies.batch_tokens),
    ):
        yield counters(name, text, "direction", {kind: counts[kind] for kind in ("forward", "backward")})
    yield counter("petalnode_server_block_changes", "Changes to other blocks.", tallies.block_changes)


# --- clients and validators


@dataclass(frozen=True, eq=False)
class ClientMetrics(MetricSource):
    """Of the sessions of a client, together."""

    totals: SessionTotals

    def collect(self) -> Iterator[Metric]:
        yield gauge("petalnode_client_sessions", "Open sessions.", len(self.totals.open))
        yield counter("petalnode_client_sessions_opened", "Sessions so far.", self.totals.opened)
        yield counter(
            "petalnode_client_recoveries", "Servers that were replaced within sessions.", self.totals.recoveries
        )
        family = HistogramMetricFamily(
            "petalnode_client_wait_seconds", "What sessions waited for, by cause.", labels=["cause"]
        )
        for cause, found in sorted(self.totals.waits.by_cause.items()):
            family.add_metric([cause], buckets(WAIT_BOUNDS, found.buckets), found.total)
        yield family


@dataclass(frozen=True, eq=False)
class VerdictMetrics(MetricSource):
    """Of what a validator has found."""

    verdicts: Counter[str]

    def collect(self) -> Iterator[Metric]:
        yield counters(
            "petalnode_verdicts",
            "Verdicts on servers' answers.",
            "verdict",
            {verdict: self.verdicts[verdict] for verdict in VERDICTS},
        )
