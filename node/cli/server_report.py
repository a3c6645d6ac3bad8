"""What `petalnode serve` tells while it runs: lines for a person, a panel at a terminal, or events in JSON."""

from __future__ import annotations

import shlex
from collections import deque
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, Final

import psutil
import trio
from rich.box import ROUNDED
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..credits.wallet import Wallet
from ..errors import SwarmError
from ..models.cache_dir import size
from ..models.quantisation import describe_numerics
from ..server.lifecycle.pausing import Pause
from ..server.tallies import ServerTallies, Serving
from ..swarm.swarm import Swarm
from .control import Control
from .join import JoinOptions
from .node_report import how_joined, how_joined_json, join_by, report_reachability
from .output import Output, ProgressBars


@dataclass(frozen=True)
class PanelLook:
    """How often the panel of a server is drawn, and how wide."""

    interval: float = 1.0
    window: float = 10.0
    """Seconds over which what is told per second is averaged."""
    points_interval: float = 60.0
    bar: int = 24
    narrow: int = 60
    digits: int = 16
    """Of the model version, in the commands that are passed on."""


PANEL: Final = PanelLook()
_STYLES: Final = {"online": "green", "draining": "yellow", "paused": "yellow", "loading": "yellow"}

_STATES: Final = {
    "ready": "serving",
    "moved": "serving",
    "resumed": "serving",
    "pausing": "pausing",
    "paused": "paused",
}
"""What an event makes of the server for `petalnode pause`."""


# --- the panel


@dataclass(frozen=True)
class Counts:
    """What only grows: tokens through the blocks, bytes on sockets, and seconds of processor time."""

    decoded: float = 0
    prefilled: float = 0
    trained: float = 0
    sent: float = 0
    received: float = 0
    cpu_seconds: float = 0.0


class ComputedRates:
    """How fast counts have grown lately."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Counts]] = deque()

    def note(self, now: float, counts: Counts) -> None:
        self._seen.append((now, counts))
        while len(self._seen) > 2 and now - self._seen[1][0] >= PANEL.window:
            self._seen.popleft()

    def per_second(self) -> Counts:
        (begun, first), (ended, last) = self._seen[0], self._seen[-1]
        grown = zip(astuple(first), astuple(last), strict=True)
        return Counts(*((after - before) / (ended - begun) for before, after in grown)) if ended > begun else Counts()


@dataclass(frozen=True)
class Points:
    """The points of this server with the validator that keeps its deposit, and their number at the start."""

    now: int
    at_start: int


@dataclass(frozen=True)
class PanelState:
    """What is shown. `direct` and `relayed` are peers; `reason` says why the server pauses, if it does."""

    serving: Serving | None
    rates: ComputedRates
    sessions_opened: int
    direct: int
    relayed: int
    reachability: str
    memory: int
    reason: str = ""
    points: Points | None = None


def panel(state: PanelState, width: int) -> Panel:
    """The panel for a terminal of `width` columns."""
    now, rates = state.serving, state.rates.per_second()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    condition = "loading" if now is None else now.state
    told = Text(condition, _STYLES[condition])
    if state.reason:
        told.append(f": {state.reason}", "default")
    table.add_row("state", told)
    if now is not None:
        blocks = f"{now.span} of {now.num_blocks}, {now.dtype} on {now.device}"
        _add_bar(table, "blocks", blocks, width, _bar(now.span.start, now.span.end, now.num_blocks))
        waiting = f", {now.waiting} wait for cache" if now.waiting else ""
        batches = f", {now.batch_streams} of training" if now.batch_streams else ""
        table.add_row("sessions", f"{now.sessions} open{waiting}{batches}, {state.sessions_opened} so far")
        used = now.cache_capacity - now.cache_free
        _add_bar(table, "cache", f"{used} of {now.cache_capacity} tokens", width, _bar(0, used, now.cache_capacity))
    decoded, prefilled = rates.decoded, rates.prefilled
    trained = rates.trained
    training = f", {trained:.1f} of training" if trained else ""
    table.add_row("tokens/s", f"{decoded:.1f} decoded, {prefilled:.1f} of prompts and drafts{training}")
    table.add_row("peers", f"{state.direct} direct, {state.relayed} through relays; {state.reachability}")
    sent, received = rates.sent, rates.received
    table.add_row("network", f"{size(round(sent))}/s up, {size(round(received))}/s down")
    table.add_row("machine", f"{rates.cpu_seconds:.0%} of a core, {size(state.memory)} of memory")
    if state.points is not None:
        table.add_row("points", f"{state.points.now}, {state.points.now - state.points.at_start:+d} since the start")
    title = "petalnode" if now is None else f"petalnode  {now.model}"
    return Panel(table, title=Text(title), title_align="left", box=ROUNDED, width=min(width, 100))


def _add_bar(table: Table, name: str, text: str, width: int, bar: Text) -> None:
    table.add_row(name, Text(text) if width < PANEL.narrow else Group(bar, Text(text)))


def _bar(start: int, end: int, of: int) -> Text:
    first = round(start * PANEL.bar / max(1, of))
    last = min(PANEL.bar, max(first + (end > start), round(end * PANEL.bar / max(1, of))))
    return Text.assemble(("·" * first, "dim"), ("█" * (last - first), "green"), ("·" * (PANEL.bar - last), "dim"))


class ServerPanel:
    """Shows the panel from `show` to `hide`; between them, lines that are printed stand above it."""

    def __init__(
        self, console: Console, swarm: Swarm, tallies: ServerTallies, pause: Pause, wallet: Wallet | None
    ) -> None:
        self._console = console
        self._swarm = swarm
        self._tallies = tallies
        self._pause = pause
        self._wallet = wallet
        self._points: Points | None = None
        self._rates = ComputedRates()
        self._process = psutil.Process()
        self._live: Live | None = None

    def show(self) -> None:
        if self._live is None:
            self._look()
            self._live = Live(self._panel(), console=self._console, auto_refresh=False, transient=True)
            self._live.start(refresh=True)

    def hide(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):
                live.stop()

    async def run(self) -> None:
        """Draws it anew every second, until cancelled. A terminal that is gone is no reason to stop serving."""
        try:
            async with trio.open_nursery() as nursery:
                if self._wallet is not None:
                    nursery.start_soon(self._keep_points, self._wallet)
                while True:
                    await trio.sleep(PANEL.interval)
                    self._look()
                    if self._live is not None:
                        self._draw(self._live)
        finally:
            self.hide()

    def _draw(self, live: Live) -> None:
        try:
            live.update(self._panel(), refresh=True)
        except OSError:
            self.hide()

    async def _keep_points(self, wallet: Wallet) -> None:
        while True:
            with suppress(SwarmError):  # the validator is away just now; what it said is shown
                credit = await wallet.credit()
                have = credit.points + credit.deposit
                self._points = Points(have, have if self._points is None else self._points.at_start)
            await trio.sleep(PANEL.points_interval)

    def _look(self) -> None:
        times, tallies, sockets = self._process.cpu_times(), self._tallies, self._swarm.host.socket_bytes
        counts = Counts(
            tallies.decode.tokens,
            tallies.prefill.tokens,
            sum(tallies.batch_tokens.values()),
            sockets.sent,
            sockets.received,
            times.user + times.system,
        )
        self._rates.note(trio.current_time(), counts)

    def _panel(self) -> Panel:
        swarm, tallies = self._swarm, self._tallies
        connected = swarm.connected()
        direct = sum(map(swarm.is_direct, connected))
        state = PanelState(
            tallies.serving() if tallies.serving is not None else None,
            self._rates,
            tallies.sessions_opened,
            direct,
            len(connected) - direct,
            swarm.reachability.kind,
            self._process.memory_info().rss,
            self._pause.reason,
            self._points,
        )
        return panel(state, self._console.width)


# --- events


class ServerReport:
    """What a server's events are to whoever started it.

    Attributes:
        is_ready: whether it has begun to serve.
    """

    def __init__(self, output: Output, join: JoinOptions, bars: ProgressBars, nursery: trio.Nursery) -> None:
        self.is_ready = False
        self.is_drained = False
        self._output = output
        self._join = join
        self._bars = bars
        self._nursery = nursery
        self._swarm: Swarm | None = None
        self._control: Control | None = None
        self._panel: ServerPanel | None = None

    def begin(self, swarm: Swarm, control: Control, panel: ServerPanel | None) -> None:
        """The node has joined. `panel` is shown while it serves."""
        self._swarm, self._control, self._panel = swarm, control, panel
        if panel is not None:
            self._nursery.start_soon(panel.run)
        self._output.say(how_joined(self._join, swarm.joined))

    def on_event(self, event: str, **fields: Any) -> None:
        """As `server.lifecycle.options.OnEvent`."""
        if self._control is not None and event in _STATES:
            self._control.tell(_STATES[event])
        if self._panel is not None and event in ("moving", "stopping"):
            self._panel.hide()  # bars of progress follow, or the end
        self._tell(event, fields)
        if self._panel is not None and event in ("ready", "moved"):
            self._panel.show()

    def _tell(self, event: str, fields: dict[str, Any]) -> None:
        output = self._output
        if event == "status":
            output.say(f"{fields['text']} ...")
            return
        if event == "ready":
            self._on_ready(fields)
            return
        if event == "stopped":
            self.is_drained = not fields["sessions"]
        elif text := in_words(event, fields):
            output.say(text)
        output.emit(event=event, **fields)

    def _on_ready(self, fields: dict[str, Any]) -> None:
        assert self._swarm is not None
        self.is_ready = True
        self._bars.stop()
        _say_ready(self._output, self._join, fields)
        self._output.emit(event="ready", **fields, joined=how_joined_json(self._swarm.joined))
        commands = [f"petalnode {command} {_model_to_pass_on(self._join, fields)}" for command in ("serve", "chat")]
        model = str(fields["model"]), bytes.fromhex(str(fields["model_version"]))
        self._nursery.start_soon(report_reachability, self._swarm, self._join, self._output, commands, model)


def in_words(event: str, fields: dict[str, Any]) -> str:
    """What an event of a server that runs is to a person; empty for one that says nothing."""
    sessions = fields.get("sessions", 0)
    left = "1 session has" if sessions == 1 else f"{sessions} sessions have"
    moving = f" when {left} moved to other servers" if sessions else ""
    match event:
        case "moving":
            (start, end), (first, last) = fields["blocks"], fields["to"]
            return f"changing from blocks {start}:{end} to {first}:{last}{moving}: {fields['reason']} ..."
        case "moved":
            start, end = fields["blocks"]
            return f"serving blocks {start}:{end} after {fields['seconds']:.1f} s, {fields['throughput']:.1f} steps/s"
        case "stopping":
            return f"stopping{f',{moving} (again Ctrl-C: at once)' if sessions else ''} ..."
        case "pausing":
            leaving = f", when {left} moved or ended" if sessions else ""
            return f"pausing{leaving}: {fields['reason']}"
        case "paused":
            return "paused: nobody is served"
        case "resumed":
            return "serving again"
    return ""


def _say_ready(output: Output, join: JoinOptions, fields: dict[str, Any]) -> None:
    start, end = fields["blocks"]
    output.say(
        f"ready after {fields['seconds']:.1f} s: blocks {start}:{end} of {fields['num_blocks']} of {fields['model']}, "
        f"{_held(fields)} on {fields['device']}, {fields['throughput']:.1f} steps/s, "
        f"{fields['cache_tokens']} cache tokens of {fields['cache_bytes_per_token'] / 1024:.3g} KiB"
    )
    if fields["adapters"]:
        output.say(f"adapters: {', '.join(fields['adapters'])}")
    if fields["addrs"]:
        how = join_by(join, fields["addrs"][0])
        model = _model_to_pass_on(join, fields)
        output.say(f"to serve with it:  petalnode serve {model} {how}")
        output.say(f"to talk to it:     petalnode chat {model} {how}")
        for other in fields["addrs"][1:]:
            output.say(f"also reachable at: {other}")


def _model_to_pass_on(join: JoinOptions, fields: dict[str, Any]) -> str:
    """The model, as a shell takes it, with its version where strangers could announce another one."""
    version = "" if join.psk is not None else f"@{fields['model_version'][: PANEL.digits]}"
    return shlex.quote(f"{fields['model']}{version}")


def _held(fields: dict[str, Any]) -> str:
    return describe_numerics(str(fields["dtype"]), str(fields["quantisation"]))
