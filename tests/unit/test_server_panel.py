"""The panel of `petalnode serve` at a terminal."""

from __future__ import annotations

import io
import shlex
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from rich.console import Console

from petalnode.node.cli.output import Output
from petalnode.node.cli.server_report import (
    PANEL,
    ComputedRates,
    Counts,
    PanelState,
    Points,
    ServerPanel,
    _say_ready,
    panel,
)
from petalnode.node.network.transport.bandwidth import ByteCount
from petalnode.node.server.lifecycle.pausing import Pause
from petalnode.node.server.tallies import ServerTallies, Serving
from petalnode.protocols.ids import Span

pytestmark = pytest.mark.virtual_time

NOW = Serving("tiny-llama", 30, Span(10, 20), "online", "float32", "none", "cpu", 2, 1, 1000, 250, 1, 0, 40.0)


def rates(*seen: tuple[float, Counts]) -> ComputedRates:
    found = ComputedRates()
    for now, counts in seen:
        found.note(now, counts)
    return found


def drawn(state: PanelState, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(panel(state, width))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_says_what_the_server_does(width: int) -> None:
    grown = Counts(100, 50, 0, 4 << 20, 2048, 15.0)
    state = PanelState(NOW, rates((0.0, Counts()), (10.0, grown)), 7, 3, 1, "public", 512 << 20)
    text = drawn(state, width)
    for said in (
        "tiny-llama", "online", "10:20 of 30", "2 open, 1 wait for cache, 1 of training, 7 so far",
        "750 of 1000 tokens", "10.0 decoded, 5.0 of prompts and drafts", "3 direct, 1 through relays; public",
        "410 KiB/s up, 0 KiB/s down",
        "150% of a core, 512 MiB",
    ):  # fmt: skip
        assert said in text, text
    assert ("········████████········" in text) == ("██████████████████······" in text) == (width >= 60)
    assert "points" not in text
    paused = replace(
        state, serving=replace(NOW, state="paused"), reason="its owner has paused it", points=Points(90, 40)
    )
    text = drawn(paused, width)
    assert "paused: its owner has paused it" in text and "90, +50 since the start" in text
    assert "loading" in drawn(replace(state, serving=None), width)


def test_figures_per_second_are_the_last_tens() -> None:
    found = ComputedRates()
    for second in range(100):
        found.note(float(second), Counts(decoded=min(second, 50) * 3))
    assert found.per_second().decoded == 0.0
    found = rates(*((float(second), Counts(decoded=second * 3)) for second in range(100)))
    assert found.per_second().decoded == pytest.approx(3.0)
    assert len(found._seen) <= PANEL.window + 2
    assert rates((5.0, Counts(decoded=9))).per_second().decoded == 0.0


class Wallet:
    """Has earned ten points each time that it is asked."""

    points = 0

    async def credit(self) -> Any:
        await trio.lowlevel.checkpoint()
        self.points += 10
        return SimpleNamespace(points=self.points, deposit=5)


class Gone(io.StringIO):
    """A terminal that may be closed."""

    gone = False

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError("input/output error")
        return super().write(text)


async def test_it_is_drawn_every_second_below_lines() -> None:
    tallies, terminal = ServerTallies(), Gone()
    tallies.serving = lambda: NOW
    swarm: Any = SimpleNamespace(
        host=SimpleNamespace(socket_bytes=ByteCount()),
        connected=lambda: ["12D3KooWA", "12D3KooWB"],
        is_direct=lambda peer_id: peer_id.endswith("A"),
        reachability=SimpleNamespace(kind="relayed"),
    )
    console = Console(file=terminal, force_terminal=True, width=100, height=40)
    shown = ServerPanel(console, swarm, tallies, Pause(), Wallet())  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shown.run)
        await trio.sleep(3 * PANEL.interval)
        assert terminal.getvalue() == ""
        shown.show()
        tallies.decode.tokens += 500
        await trio.sleep(1.5 * PANEL.interval)
        console.print("a line")
        await trio.sleep(100 * PANEL.interval)
        text = terminal.getvalue()
        assert "1 direct, 1 through relays; relayed" in text and "100.0 decoded" in text
        assert "15, +0 since the start" in text and "25, +10 since the start" in text
        assert "a line" in text and "\x1b[?25l" in text and not text.rstrip("\n").endswith("\x1b[?25h")
        shown.hide()
        assert terminal.getvalue().count("\x1b[?25h") == 1  # the cursor is back
        before = len(terminal.getvalue())
        await trio.sleep(10 * PANEL.interval)
        assert len(terminal.getvalue()) == before
        shown.show()
        terminal.gone = True
        await trio.sleep(10 * PANEL.interval)  # nobody sees it, and nothing ends
        nursery.cancel_scope.cancel()


def test_commands_to_pass_on_are_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    joined: Any = SimpleNamespace(psk=bytes(32), key_file="my key")
    said = dict.fromkeys(("seconds", "throughput", "cache_tokens", "cache_bytes_per_token"), 1.0)
    held = {"blocks": (0, 6), "num_blocks": 6, "dtype": "float32", "quantisation": "none", "device": "cpu"}
    _say_ready(Output(False), joined, {**said, **held, "model": "my model", "adapters": (), "addrs": ("/ip4/1",)})
    commands = [line.partition("petalnode ")[2] for line in capsys.readouterr().out.splitlines() if "petalnode" in line]
    expected = ["my model", "--peer", "/ip4/1", "--swarm-key", "my key"]
    assert [shlex.split(command) for command in commands] == [["serve", *expected], ["chat", *expected]]
