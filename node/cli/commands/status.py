"""`petalnode status`: the servers of a swarm, drawn over the blocks that they hold, and its relays."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Final

import trio
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ....protocols.adapter import AnnouncedAdapter
from ....protocols.announcement import Announcement, ServerState
from ....protocols.framing import PeerError
from ...client.round_trips import measure_rtts
from ...client.session_adapter import announced
from ...errors import SwarmError
from ...models.quantisation import is_exact
from ...swarm.routing import describe_blocks
from ...swarm.swarm import Swarm
from ...swarm.view import SwarmView, coverage_of
from ...web.swarm_report import announced_fields
from ..join import JoinOptions, joined, joins_swarm
from ..model_choice import is_named
from ..node_report import nobody_serves
from ..option import option
from ..output import Output, whole_figures


@dataclass(frozen=True)
class StatusLook:
    """How wide the bars are, and how often relays are asked."""

    bar_width: int = 60
    wide: int = 80
    """Columns of a terminal from which on the blocks are drawn."""
    watch_seconds: int = 2
    relays_interval: float = 15.0
    max_asked: int = 32
    answer_timeout: float = 2.5  # seconds


STATUS: Final = StatusLook()


@joins_swarm
def status(
    model: Annotated[str | None, typer.Argument(help="Show only the model of this name.")] = None,
    watch: float | None = option(
        None,
        f"Go on, and look again at this interval ({STATUS.watch_seconds} s unless given) until Ctrl-C.",
        "[SECONDS]",
        min=0.5,
    ),
    *,
    join: JoinOptions,
) -> None:
    """Show the models of a swarm, its servers and the blocks that they hold, and its relays."""
    join.check()
    trio.run(_status, model, join, watch)


async def _status(model: str | None, join: JoinOptions, watch: float | None) -> None:
    output = Output(join.json)
    async with joined(join, output, role="status", listens=False) as (swarm, _):
        if watch is not None:
            await _watch(swarm, model, output, watch)
            return
        view = await swarm.refresh(timeout=5)
        models = models_of(view, model, time.time())
        if not models:
            raise await nobody_serves(swarm, "any model" if model is None else model)
        models = await with_answers(swarm, models)
        relays = await known_relays(swarm)
        if join.json:
            for found in models:
                output.emit(**_as_json(found), relays=list(map(asdict, relays)))
        else:
            for part in picture(models, relays, output.console.width):
                if isinstance(part, Table):
                    output.table(part)
                else:
                    output.say(part.plain, style=str(part.style))


async def _watch(swarm: Swarm, model: str | None, output: Output, seconds: float) -> None:
    """Shows the swarm again every `seconds`, in the same place where standard output is a terminal."""
    relays: list[Relay] = []
    asked = -math.inf
    drawn = output.console.is_terminal and not output.as_json
    # What stands below the last line of the terminal is left out; nothing scrolls.
    with Live(console=output.console, auto_refresh=False) if drawn else nullcontext() as live:
        while True:
            due = trio.current_time() + seconds
            with suppress(SwarmError):  # nobody answers just now: what was heard is shown, and expires
                await swarm.refresh(timeout=5)
            if trio.current_time() - asked >= STATUS.relays_interval:
                asked = trio.current_time()
                relays = await known_relays(swarm)
            now = time.time()
            models = await with_answers(swarm, models_of(swarm.view, model, now))
            if output.as_json:
                for found in models:
                    output.emit(**_as_json(found), relays=list(map(asdict, relays)), time=now)
                if not models:
                    output.emit(**_as_json(ModelServers("", b"", 0)), relays=list(map(asdict, relays)), time=now)
            else:
                parts = [*picture(models, relays, output.console.width), _looked(now, seconds, bool(models))]
                if live is not None:
                    live.update(Group(*parts), refresh=True)
                else:
                    output.table(Group(*parts))
            await trio.sleep_until(due)


def _looked(now: float, seconds: float, found: bool) -> Text:
    said = "" if found else "nobody serves a model (yet); "
    return Text(
        f"{said}{time.strftime('%H:%M:%S', time.localtime(now))}, every {seconds:g} s until Ctrl-C", style="dim"
    )


@dataclass(frozen=True)
class ModelServers:
    """The servers of one model version, in the order of their spans; `ignored` say that it has other blocks. `answers`
    says of those that were asked whether they answer."""

    name: str
    version: bytes
    num_blocks: int
    servers: tuple[Announcement, ...] = ()
    ignored: tuple[Announcement, ...] = ()
    answers: Mapping[str, bool] = field(default_factory=dict)

    @property
    def coverage(self) -> list[int]:
        """For each block the servers that are online, without those that do not answer."""
        return coverage_of((one for one in self.servers if self.answers.get(one.peer_id, True)), self.num_blocks)


def models_of(view: SwarmView, model: str | None, now: float) -> list[ModelServers]:
    """The models that are served, or the versions of one; `now` in seconds since 1970."""
    found = []
    for version, (name, num_blocks) in sorted(view.models(now=now).items(), key=lambda item: item[1]):
        if is_named(model, name, version):
            known = sorted(view.servers(version, now=now), key=lambda server: (server.span, server.peer_id))
            fitting = tuple(server for server in known if server.num_blocks == num_blocks)
            others = tuple(server for server in known if server.num_blocks != num_blocks)
            found.append(ModelServers(name, version, num_blocks, fitting, others))
    return found


async def with_answers(swarm: Swarm, models: Sequence[ModelServers]) -> list[ModelServers]:
    """The models with what their servers answer: no more are asked than `STATUS` says, those that computed for this
    node first."""
    peers = {server.peer_id for model in models for server in model.servers}
    ranked = sorted(peers, key=lambda peer: (-swarm.trust.reputation(peer), peer))[: STATUS.max_asked]
    found = await measure_rtts(swarm, ranked, timeout=STATUS.answer_timeout)
    answers = {peer: isinstance(seconds, float) for peer, seconds in found.items()}
    return [replace(model, answers=answers) for model in models]


def picture(models: Sequence[ModelServers], relays: Sequence[Relay], width: int) -> list[Table | Text]:
    """The swarm for a person: a table for each model, lines for what is missing, adapters and relays."""
    parts: list[Table | Text] = []
    for model in models:
        parts.append(server_table(model, narrow=width < STATUS.wide))
        parts += map(Text, [*exact_lines(model.servers), *adapter_lines(model.servers)])
        parts += [
            Text(f"ignored: {server.peer_id} announces that {model.name} has {server.num_blocks} blocks")
            for server in model.ignored
        ]
        missing = [block for block, count in enumerate(model.coverage) if not count]
        if missing:
            text = f"nobody serves {describe_blocks(missing)}: no answers until somebody does"
            parts.append(Text(text, style="red"))
    parts += [Text(f"relay {relay}") for relay in relays]
    if not relays:
        parts.append(Text("relays: none known, so nodes behind NAT cannot be reached from outside their network"))
    return parts


def exact_lines(servers: Sequence[Announcement]) -> list[str]:
    """A line for the blocks that are computed with the same bits everywhere (docs/exact.md), if there are any."""
    spans = [server.span for server in servers if is_exact(server.quantisation)]
    blocks = {block for span in spans for block in range(span.start, span.end)}
    if not spans:
        return []
    return [f"exact to the bit: {describe_blocks(sorted(blocks))}, by {len(spans)} of {len(servers)} servers"]


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


def _as_json(model: ModelServers) -> dict[str, object]:
    return {
        "model": model.name,
        "model_version": model.version.hex(),
        "num_blocks": model.num_blocks,
        "coverage": model.coverage,
        "servers": [
            announced_fields(server)
            | {"answers": model.answers.get(server.peer_id), "exact": is_exact(server.quantisation)}
            | {"fixed": server.fixed, "addrs": list(server.addrs)}
            for server in model.servers
        ],
    }


def _state(server: Announcement) -> str:
    """The announced state, and the blocks that the server will change to, if any."""
    state = server.state.name.lower()
    if server.next_span is not None and server.next_span != server.span:
        return f"{state}, goes to {server.next_span}"
    return f"{state}, fixed" if server.fixed else state


def server_table(model: ModelServers, *, narrow: bool = False) -> Table:
    """The servers of a model, drawn over its blocks; a `narrow` table has neither drawing nor version."""
    num_blocks, servers = model.num_blocks, model.servers
    table = Table(
        title=f"{model.name}  {num_blocks} blocks" + ("" if narrow else f"  version {model.version.hex()[:12]}"),
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
    if not narrow and servers:
        table.add_row(_coverage_bar(model.coverage), "", "servers online", "", "", "", style="bold")
    for server in servers:
        table.add_row(
            *([] if narrow else [_bar(server, num_blocks, model.answers.get(server.peer_id, True))]),
            str(server.span),
            server.public_name or "…" + server.peer_id[-8:],
            _state(server) if model.answers.get(server.peer_id, True) else "not answering",
            f"{1 / server.step_seconds if server.step_seconds else 0:.1f}",
            f"{server.cache_tokens_free}",
        )
    return whole_figures(table)


def _width(num_blocks: int) -> int:
    return min(STATUS.bar_width, max(num_blocks, 20))


def _coverage_bar(coverage: Sequence[int]) -> Text:
    """For each column of the bars the least number of servers that are online for its blocks; + for ten and more."""
    width, bar = _width(len(coverage)), Text()
    for column in range(width):
        first = column * len(coverage) // width
        least = min(coverage[first : max(first + 1, (column + 1) * len(coverage) // width)])
        bar.append(str(least) if least < 10 else "+", "red" if not least else "yellow" if least == 1 else "green")
    return bar


def _bar(server: Announcement, num_blocks: int, answers: bool) -> Text:
    width = _width(num_blocks)
    start = round(server.span.start * width / num_blocks)
    end = min(width, max(start + 1, round(server.span.end * width / num_blocks)))
    colour = {ServerState.ONLINE: "green", ServerState.JOINING: "yellow"}.get(server.state, "red") if answers else "red"
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


async def _ask_relay(swarm: Swarm, peer_id: str, found: dict[str, Relay]) -> None:
    try:
        info = await swarm.ask_node(peer_id, timeout=STATUS.answer_timeout)
    except PeerError:
        return
    found.pop(peer_id, None)
    if info.relay is not None:
        offer = info.relay
        found[peer_id] = Relay(peer_id, info.role, offer.reservations, offer.free, info.circuits, info.relayed_bytes)


async def known_relays(swarm: Swarm) -> list[Relay]:
    """The relays among the known servers and the connected peers: as they answer, else as they announce."""
    announced = {
        server.peer_id: Relay(server.peer_id, "server", server.relay.reservations, server.relay.free)
        for server in swarm.view.servers(now=time.time())
        if server.relay is not None
    }
    asked = list(dict.fromkeys([*swarm.connected(), *announced]))[: STATUS.max_asked]
    found = dict(announced)
    async with trio.open_nursery() as nursery:
        for peer_id in asked:
            nursery.start_soon(_ask_relay, swarm, peer_id, found)
    return sorted(found.values(), key=lambda relay: (relay.role, relay.peer_id))
