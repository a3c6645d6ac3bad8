"""What `petalnode serve` tells while it runs: lines for a person, or events in JSON."""

from __future__ import annotations

from typing import Any, Final

import trio

from ..models.quantisation import describe_numerics
from ..swarm.swarm import Swarm
from .control import Control
from .join import JoinOptions
from .node_report import how_joined, how_joined_json, join_by, report_reachability
from .output import Output, ProgressBars
from .server_panel import ServerPanel

_DIGITS: Final = 16
"""Of the model version, in the commands that are passed on."""
_STATES: Final = {
    "ready": "serving",
    "moved": "serving",
    "resumed": "serving",
    "pausing": "pausing",
    "paused": "paused",
}
"""What an event makes of the server for `petalnode pause`."""


class ServerReport:
    """What a server's events are to whoever started it.

    Attributes:
        is_ready: whether it has begun to serve.
    """

    def __init__(self, output: Output, join: JoinOptions, bars: ProgressBars, nursery: trio.Nursery) -> None:
        self.is_ready = False
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
        if event in ("moving", "moved"):
            _say_change(output, event, fields)
        elif event == "stopping":
            sessions = fields["sessions"]
            moving = f", when {sessions} sessions have moved to other servers (again Ctrl-C: at once)"
            output.say(f"stopping{moving if sessions else ''} ...")
        else:
            _say_pause(output, event, fields)
        output.emit(event=event, **fields)

    def _on_ready(self, fields: dict[str, Any]) -> None:
        assert self._swarm is not None
        self.is_ready = True
        self._bars.stop()
        _say_ready(self._output, self._join, fields)
        self._output.emit(event="ready", **fields, joined=how_joined_json(self._swarm.joined))
        commands = [f"petalnode {command} {_model_to_pass_on(self._join, fields)}" for command in ("serve", "chat")]
        self._nursery.start_soon(report_reachability, self._swarm, self._join, self._output, commands)


def _say_pause(output: Output, event: str, fields: dict[str, Any]) -> None:
    if event == "pausing":
        leaving = f", when {fields['sessions']} sessions have moved or ended" if fields["sessions"] else ""
        output.say(f"pausing{leaving}: {fields['reason']}")
    elif event == "paused":
        output.say("paused: nobody is served")
    elif event == "resumed":
        output.say("serving again")


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
    """The model with its version, where strangers could announce another one."""
    return str(fields["model"]) if join.psk is not None else f"{fields['model']}@{fields['model_version'][:_DIGITS]}"


def _say_change(output: Output, event: str, fields: dict[str, Any]) -> None:
    start, end = fields["blocks"]
    if event == "moving":
        first, last = fields["to"]
        leaving = f" when {fields['sessions']} sessions have moved to other servers" if fields["sessions"] else ""
        output.say(f"changing from blocks {start}:{end} to {first}:{last}{leaving}: {fields['reason']} ...")
    else:
        output.say(f"serving blocks {start}:{end} after {fields['seconds']:.1f} s, {fields['throughput']:.1f} steps/s")


def _held(fields: dict[str, Any]) -> str:
    return describe_numerics(str(fields["dtype"]), str(fields["quantisation"]))
