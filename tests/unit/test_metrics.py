"""Metrics: Prometheus' conventions, the page at which they are read, and what is counted."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass

import h11
import pytest
import trio
import trio.testing
from prometheus_client import exposition, parser
from prometheus_client.metrics_core import Metric

from petalnode.crypto.identity import Identity
from petalnode.node.api.engine.generation import ApiTallies
from petalnode.node.api.http.server import LOOPBACK, HttpLimits, HttpServer, listen, url_of
from petalnode.node.client.deadlines import SessionTotals, Waits
from petalnode.node.errors import MachineError
from petalnode.node.monitoring.api_metrics import ApiMetrics
from petalnode.node.monitoring.endpoint import MetricsApplication
from petalnode.node.monitoring.metrics import (
    INTERVAL,
    WINDOW,
    ClientMetrics,
    LoopDelay,
    Metrics,
    NodeMetrics,
    ProcessMetrics,
    ServerMetrics,
    VerdictMetrics,
)
from petalnode.node.server.tallies import Distribution, ServerTallies, Serving
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.protocols.directory import DIRECTORY
from petalnode.protocols.ids import Span
from tests.import_graph import ROOT
from tests.memory_muxer import accepted, settled

UNITS = ("seconds", "bytes", "tokens", "rows")
MADE_UP = {"ms", "milliseconds", "kb", "mb", "percent", "minutes", "count", "histogram", "gauge", "counter"}
LABELS = {
    *("le", "role", "version", "path", "direction", "protocol", "kind", "state", "model", "dtype", "quantisation"),
    *("device", "code", "cause", "verdict", "reason"),
}
"""None of them has a value that a stranger chooses."""


def worked() -> ServerTallies:
    tallies = ServerTallies()
    tallies.decode.add(3, 0.002, 0.02)
    tallies.prefill.add(40, 0.2, 4.0)
    tallies.batch_rows.add(3)
    tallies.refusals["ERROR_CACHE_FULL"] += 2
    tallies.batches["backward"] += 1
    tallies.serving = lambda: Serving(
        "tiny", 6, Span(2, 5), "online", "float32", "none", "cpu", 2, 1, 1000, 700, 0, 4, 12.5
    )
    return tallies


@dataclass
class Session:
    """What is counted of one."""

    waits: Waits
    recoveries: int = 0


def waited(recoveries: int = 7) -> SessionTotals:
    """Of one session that is over and one that is open."""
    totals, over, open_now = SessionTotals(), Session(Waits(), recoveries - 2), Session(Waits(), 2)
    for session in (over, open_now):
        for seconds in (0.005, 0.01, 0.02, 100.0):
            session.waits.add("answer", seconds)
    with totals.counted(over):
        assert totals.open == [over]
    totals.open.append(open_now)
    return totals


def answered() -> ApiTallies:
    tallies = ApiTallies()
    tallies.answers.update(stop=2, failed=1)
    tallies.tokens.update(prompt=30, cached=10, completion=5)
    tallies.first_token.add(0.2)
    return tallies


async def page_of_a_node() -> str:
    """All that there is."""
    async with (
        open_swarm(SwarmConfig(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))) as relay,
        open_swarm(SwarmConfig(Identity.generate(), peers=tuple(relay.addrs))) as swarm,
    ):
        assert relay.connected() == [swarm.peer_id]
        metrics = Metrics(ProcessMetrics(LoopDelay()), NodeMetrics(swarm, "client"))
        for source in (
            ServerMetrics(worked()),
            ClientMetrics(waited()),
            ApiMetrics(answered()),
            VerdictMetrics(Counter({"faulty": 1})),
        ):
            metrics.register(source)
        assert swarm.peer_id not in exposition.generate_latest(metrics).decode()
        return exposition.generate_latest(metrics).decode()


@pytest.fixture(scope="module")
def page() -> str:
    return trio.run(page_of_a_node)


def values(page: str) -> dict[str, float]:
    """By name, and labels if there are any."""
    samples = (sample for family in parser.text_string_to_metric_families(page) for sample in family.samples)
    return {
        f"{sample.name}{sorted(sample.labels.items())}" if sample.labels else sample.name: sample.value
        for sample in samples
    }


def test_names_and_units_follow_the_conventions(page: str) -> None:
    """https://prometheus.io/docs/practices/naming: base units, a prefix, _total for counters only, a sentence each."""
    families = list(parser.text_string_to_metric_families(page))
    assert len({family.name for family in families}) == len(families) > 30
    for family in families:
        name = family.name
        assert re.fullmatch(r"(petalnode|process)(_[a-z]+)+", name), name
        assert not MADE_UP & set(name.split("_")), name
        assert family.documentation.endswith(".") and family.documentation[0].isupper(), name
        assert family.type in ("counter", "gauge", "histogram"), name
        assert not name.endswith("_total"), name  # the parser takes it off counters; nothing else may have it
        for unit in UNITS:
            if unit in name and not name.endswith("_per_second"):
                assert name.endswith((unit, f"{unit}_max")) or f"_{unit}_" not in name, name
        if family.type == "histogram":
            assert name.endswith(UNITS), name
            assert any(sample.labels.get("le") == "+Inf" for sample in family.samples), name
        assert {label for sample in family.samples for label in sample.labels} <= LABELS, name


def test_the_docs_have_all_of_them(page: str) -> None:
    named = set(re.findall(r"`((?:petalnode|process)_[a-z_]+)`", (ROOT / "docs/monitoring.md").read_text()))
    families = parser.text_string_to_metric_families(page)
    there = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert named == there


def test_the_dashboard_shows_what_there_is(page: str) -> None:
    dashboard = json.loads((ROOT / "packaging/grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    families = {family.name: family for family in parser.text_string_to_metric_families(page)}
    there = {sample.name: set(sample.labels) for family in families.values() for sample in family.samples}
    assert len(expressions) > 30
    for expression in expressions:
        found = re.findall(r"((?:petalnode|process)_[a-z_]+)\{([^}]*)\}", expression)
        assert found and len(found) == len(re.findall(r"(?:petalnode|process)_", expression)), expression
        labels = {"instance", "job", *(label for name, _ in found for label in there[name])}
        for _, selected in found:
            assert set(re.findall(r"([a-z]+)=", selected)) <= labels, expression
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            assert set(grouped.split(", ")) <= labels, expression
        assert ("rate(" in expression) == all(type_of(name, families) != "gauge" for name, _ in found), expression
    used = {name for expression in expressions for name in re.findall(r"petalnode_[a-z_]+", expression)}
    assert len(used) > 25
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def type_of(sample: str, families: dict[str, Metric]) -> str:
    """The type of the metric of a sample, which of a histogram or a counter has a suffix."""
    whole = re.sub(r"_(bucket|sum|count|total)$", "", sample)
    return str(families[sample if sample in families else whole].type)


def test_what_was_counted_is_told(page: str) -> None:
    found = values(page)
    for name, value in {
        "petalnode_connected_peers": 1,
        "petalnode_client_recoveries_total": 7,
        "petalnode_server_tokens_total[('kind', 'prefill')]": 40,
        "petalnode_server_compute_seconds_bucket[('kind', 'prefill'), ('le', '3.0')]": 0,
        "petalnode_server_compute_seconds_bucket[('kind', 'prefill'), ('le', '10.0')]": 1,
        "petalnode_server_compute_seconds_sum[('kind', 'prefill')]": 4,
        "petalnode_server_batch_rows_bucket[('le', '2.0')]": 0,
        "petalnode_server_batch_rows_bucket[('le', '4.0')]": 1,
        "petalnode_server_refusals_total[('code', 'cache_full')]": 2,
        "petalnode_server_cache_used_tokens": 300,
        "petalnode_server_state[('state', 'online')]": 1,
        "petalnode_server_state[('state', 'paused')]": 0,
        "petalnode_verdicts_total[('verdict', 'faulty')]": 1,
        "petalnode_verdicts_total[('verdict', 'ok')]": 0,
        "petalnode_client_wait_seconds_bucket[('cause', 'answer'), ('le', '0.01')]": 4,
        "petalnode_client_wait_seconds_bucket[('cause', 'answer'), ('le', '10.0')]": 6,
        "petalnode_client_wait_seconds_count[('cause', 'answer')]": 8,
        "petalnode_client_sessions": 1,
        "petalnode_client_sessions_opened_total": 1,
        "petalnode_api_answers_total[('reason', 'stop')]": 2,
        "petalnode_api_answers_total[('reason', 'length')]": 0,
        "petalnode_api_tokens_total[('kind', 'cached')]": 10,
        "petalnode_api_first_token_seconds_bucket[('le', '0.1')]": 0,
        "petalnode_api_first_token_seconds_bucket[('le', '0.3')]": 1,
        "petalnode_reachability[('kind', 'public')]": 0,
    }.items():
        assert found[name] == value, name
    assert found["process_cpu_seconds_total"] > 0 and found["process_resident_memory_bytes"] > 1 << 20
    # It has asked who is there, over a connection that has begun with a handshake.
    asked = found[f"petalnode_protocol_sent_bytes_total[('protocol', '{DIRECTORY.id}')]"]
    assert 0 < asked < found["petalnode_socket_sent_bytes_total"]


def test_a_server_that_loads_has_no_blocks_yet() -> None:
    found = values(exposition.generate_latest(Metrics(ServerMetrics(ServerTallies()))).decode())
    assert found["petalnode_server_state[('state', 'loading')]"] == 1
    assert "petalnode_server_blocks" not in found


def test_each_node_has_metrics_of_its_own() -> None:
    one, other = Metrics(ClientMetrics(waited(3))), Metrics(ClientMetrics(waited(4)))
    pages = [values(exposition.generate_latest(metrics).decode()) for metrics in (one, other)]
    assert [found["petalnode_client_recoveries_total"] for found in pages] == [3, 4]


def test_distribution_has_its_bounds_in_lower_bucket() -> None:
    found = Distribution((1, 2))
    for value in (1, 1.5, 2, 2.5):
        found.add(value)
    assert (found.buckets, found.total) == ([1, 2, 1], 7.0)


# --- bytes


@pytest.mark.virtual_time
async def test_bytes_count_for_protocol_that_was_agreed_on() -> None:
    async with accepted() as (ours, other, stream):
        other.send(1, b"hello")
        await settled()
        stream.agree("/a/1")
        other.send(1, b"x" * 100)
        await settled()
        await stream.write(b"y" * 70_000)
        assert stream.write_nowait(b"z" * 30)
        counts = {name: (count.received, count.sent) for name, count in ours.traffic.by_protocol.items()}
        assert counts == {"negotiation": (5, 0), "/a/1": (100, 70_030)}


# --- the event loop


@pytest.mark.virtual_time
async def test_a_loop_that_stands_still_is_noticed() -> None:
    delay = LoopDelay()
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(delay.run)
        await trio.sleep(10 * INTERVAL)
        assert delay.longest(trio.current_time()) == 0.0
        clock.jump(3.0)  # as if something had computed for so long
        await trio.testing.wait_all_tasks_blocked()
        assert delay.longest(trio.current_time()) == pytest.approx(3.0, abs=INTERVAL)
        await trio.sleep(WINDOW + 1)
        assert delay.longest(trio.current_time()) == 0.0
        assert delay.seconds.buckets[-2:] == [1, 0]
        nursery.cancel_scope.cancel()


# --- the page


async def asked(request: bytes, hosts: frozenset[str] = LOOPBACK) -> tuple[int, str, bytes]:
    """Status, content type and body of the answer."""
    metrics = Metrics(ClientMetrics(waited()))
    ours, theirs = trio.testing.memory_stream_pair()
    client = h11.Connection(h11.CLIENT)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(HttpServer(MetricsApplication(metrics, hosts), HttpLimits()).serve, theirs)
        method, target = request.split()
        head = h11.Request(method=method, target=target.split(b"@")[0], headers=[("Host", target.split(b"@")[1])])
        await ours.send_all(client.send(head) or b"")
        await ours.send_all(client.send(h11.EndOfMessage()) or b"")
        status, kind, body = 0, "", b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                client.receive_data(bytes(await ours.receive_some(1 << 16)))
            elif isinstance(event, h11.Response):
                status, kind = event.status_code, dict(event.headers)[b"content-type"].decode()
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
        await ours.aclose()
        return status, kind, body


@pytest.mark.virtual_time
async def test_the_page_has_the_metrics_and_nothing_else() -> None:
    status, kind, body = await asked(b"GET /metrics@127.0.0.1:9100")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert values(body.decode())["petalnode_client_recoveries_total"] == 7
    assert await asked(b"HEAD /metrics@localhost") == (200, kind, b"")
    for request in (b"GET /@localhost", b"GET /metrics/x@localhost", b"POST /metrics@localhost"):
        assert (await asked(request))[0] == 404


@pytest.mark.virtual_time
@pytest.mark.parametrize("host", [b"evil.example", b"127.0.0.1.evil.example:9100", b"[", b"::1"])
async def test_page_that_calls_itself_this_machine_reads_nothing(host: bytes) -> None:
    status, _, body = await asked(b"GET /metrics@" + host)
    assert status == 403 and b"petalnode_" not in body
    assert (await asked(b"GET /metrics@" + host, frozenset()))[0] == 200


async def test_taken_port_is_told_in_one_line() -> None:
    first = await listen("127.0.0.1", 0, "--metrics-port")
    url = url_of("127.0.0.1", first)
    assert url.startswith("http://127.0.0.1:")
    with pytest.raises(MachineError, match=r"--metrics-port \d+ at 127.0.0.1 is in use"):
        await listen("127.0.0.1", int(url.rpartition(":")[2]), "--metrics-port")
    for listener in first:
        await listener.aclose()
