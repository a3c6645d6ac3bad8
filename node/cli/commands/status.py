"""`petalnode status`: the servers of a swarm, drawn over the blocks that they hold, and its relays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import trio
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ....protocols.adapter import AnnouncedAdapter
from ....protocols.announcement import Announcement, ServerState
from ....protocols.framing import PeerError
from ...client.session_adapter import announced
from ...swarm.routing import describe_blocks
from ...swarm.swarm import Swarm
from ..join import JoinOptions, joined, joins_swarm
from ..model_choice import is_named
from ..node_report import nobody_serves
from ..output import Output

_BAR_WIDTH = 60
_WIDE = 80
"""Columns of a terminal from which on the blocks are drawn."""
_MAX_ASKED = 32
_ANSWER_TIMEOUT = 2.5  # seconds


@joins_swarm
def status(
    model: Annotated[str | None, typer.Argument(help="Show only the model of this name.")] = None,
    *,
    join: JoinOptions,
) -> None:
    """Show the models of a swarm, its servers and the blocks that they hold, and its relays."""
    join.check()
    trio.run(_status, model, join)


async def _status(model: str | None, join: JoinOptions) -> None:
    output = Output(join.json)
    async with joined(join, output, role="status", listens=False) as (swarm, _):
        view = await swarm.refresh(timeout=5)
        models = {
            version: (name, num_blocks)
            for version, (name, num_blocks) in view.models(now=time.time()).items()
            if is_named(model, name, version)
        }
        if not models:
            raise await nobody_serves(swarm, "any model" if model is None else model)
        relays = await known_relays(swarm)
        for version, (name, num_blocks) in sorted(models.items(), key=lambda item: item[1]):
            known = sorted(view.servers(version, now=time.time()), key=lambda server: (server.span, server.peer_id))
            servers = [server for server in known if server.num_blocks == num_blocks]
            coverage = coverage_of(servers, num_blocks)
            output.emit(**_as_json(name, version, num_blocks, servers, coverage), relays=list(map(asdict, relays)))
            if not join.json:
                narrow = output.console.width < _WIDE
                output.table(server_table(name, version, num_blocks, servers, narrow=narrow))
                for line in adapter_lines(servers):
                    output.say(line)
                missing = [block for block, count in enumerate(coverage) if not count]
                for server in known:
                    if server.num_blocks != num_blocks:
                        output.say(f"ignored: {server.peer_id} announces that {name} has {server.num_blocks} blocks")
                if missing:
                    output.say(f"nobody serves {describe_blocks(missing)}: no answers until somebody does", style="red")
        if not join.json:
            for relay in relays:
                output.say(f"relay {relay}")
            if not relays:
                output.say("relays: none known, so nodes behind NAT cannot be reached from outside their network")


def adapter_lines(servers: Sequence[Announcement]) -> list[str]:
    """A line for each adapter that servers hold: its name, its hash and the blocks it is on."""
    held: dict[AnnouncedAdapter, set[int]] = {}
    for server in servers:
        for adapter in announced(server):
            held.setdefault(adapter, set()).update(range(server.span.start, server.span.end))
    return [
        f"adapter {adapter.name}@{adapter.hash.hex()[:8]}: {describe_blocks(sorted(blocks))}"
        for adapter, blocks in sorted(held.items(), key=lambda item: (item[0].name, item[0].hash))
    ]


def coverage_of(servers: Sequence[Announcement], num_blocks: int) -> list[int]:
    """For each block, the number of online servers that hold it."""
    online = [server.span for server in servers if server.state is ServerState.ONLINE]
    return [sum(block in span for span in online) for block in range(num_blocks)]


def _as_json(
    name: str, version: bytes, num_blocks: int, servers: Sequence[Announcement], coverage: list[int]
) -> dict[str, object]:
    return {
        "model": name,
        "model_version": version.hex(),
        "num_blocks": num_blocks,
        "coverage": coverage,
        "servers": [
            {
                "peer_id": server.peer_id,
                "name": server.public_name,
                "blocks": [server.span.start, server.span.end],
                "state": server.state.name.lower(),
                "throughput": _throughput(server),
                "cache_tokens_free": server.cache_tokens_free,
                "cache_tokens": server.cache_tokens,
                "dtype": server.dtype,
                "quantisation": server.quantisation,
                "adapters": [adapter.name for adapter in announced(server)],
                "queue_depth": server.queue_depth,
                "fixed": server.fixed,
                "next_blocks": [server.next_span.start, server.next_span.end] if server.next_span else None,
                "addrs": list(server.addrs),
                "software_version": server.software_version,
            }
            for server in servers
        ],
    }


def _state(server: Announcement) -> str:
    """The announced state, and the blocks that the server will change to, if any."""
    state = server.state.name.lower()
    if server.next_span is not None and server.next_span != server.span:
        return f"{state}, goes to {server.next_span}"
    return f"{state}, fixed" if server.fixed else state


def _throughput(server: Announcement) -> float:
    return round(1 / server.step_seconds, 2) if server.step_seconds else 0.0


def server_table(
    name: str, version: bytes, num_blocks: int, servers: Sequence[Announcement], *, narrow: bool = False
) -> Table:
    """The servers of a model, drawn over its blocks; a `narrow` table has neither drawing nor version."""
    table = Table(
        title=f"{name}  {num_blocks} blocks" + ("" if narrow else f"  version {version.hex()[:12]}"),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    if not narrow:
        table.add_column(f"blocks 0 to {num_blocks}", no_wrap=True)
    table.add_column("span", justify="right", no_wrap=True)
    table.add_column("server", no_wrap=not narrow, overflow="fold")
    table.add_column("state", min_width=6 if narrow else 8)
    table.add_column("steps/s", justify="right", no_wrap=True)
    table.add_column("cache" if narrow else "free cache", justify="right", no_wrap=narrow)
    for server in servers:
        table.add_row(
            *([] if narrow else [_bar(server, num_blocks)]),
            str(server.span),
            server.public_name or "…" + server.peer_id[-8:],
            _state(server),
            f"{_throughput(server):.1f}",
            f"{server.cache_tokens_free}",
        )
    return table


def _bar(server: Announcement, num_blocks: int) -> Text:
    width = min(_BAR_WIDTH, max(num_blocks, 20))
    start = round(server.span.start * width / num_blocks)
    end = min(width, max(start + 1, round(server.span.end * width / num_blocks)))
    colour = {ServerState.ONLINE: "green", ServerState.JOINING: "yellow"}.get(server.state, "red")
    return Text.assemble(("·" * start, "dim"), ("█" * (end - start), colour), ("·" * (width - end), "dim"))


@dataclass(frozen=True)
class Relay:
    """A node that relays, and its load; circuits and relayed bytes are None if it did not answer."""

    peer_id: str
    role: str
    reservations: int
    free: int
    circuits: int | None = None
    relayed_bytes: int | None = None

    def __str__(self) -> str:
        load = f"{self.reservations} of {self.reservations + self.free} places taken"
        if self.circuits is not None and self.relayed_bytes is not None:
            load += f", {self.circuits} connections now, {self.relayed_bytes / 1e6:.1f} MB so far"
        return f"…{self.peer_id[-8:]} ({self.role}): {load}"


async def known_relays(swarm: Swarm) -> list[Relay]:
    """The relays among the known servers and the connected peers: as they answer, else as they announce."""
    announced = {
        server.peer_id: Relay(server.peer_id, "server", server.relay.reservations, server.relay.free)
        for server in swarm.view.servers(now=time.time())
        if server.relay is not None
    }
    asked = list(dict.fromkeys([*swarm.connected(), *announced]))[:_MAX_ASKED]
    found = dict(announced)

    async def ask(peer_id: str) -> None:
        try:
            info = await swarm.ask_node(peer_id, timeout=_ANSWER_TIMEOUT)
        except PeerError:
            return
        found.pop(peer_id, None)
        if info.relay is not None:
            offer = info.relay
            found[peer_id] = Relay(
                peer_id, info.role, offer.reservations, offer.free, info.circuits, info.relayed_bytes
            )

    async with trio.open_nursery() as nursery:
        for peer_id in asked:
            nursery.start_soon(ask, peer_id)
    return sorted(found.values(), key=lambda relay: (relay.role, relay.peer_id))
