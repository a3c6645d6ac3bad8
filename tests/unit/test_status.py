"""`petalnode status`: the picture of a swarm, once and again and again."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import trio
from rich.console import Console

from petalnode.crypto.identity import Identity
from petalnode.node.cli.app import with_values
from petalnode.node.cli.commands import status
from petalnode.node.cli.output import Output
from petalnode.node.testing import MemoryNetwork
from petalnode.node.testing.memory_network import MemoryNode
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.framing import StreamClosed
from petalnode.protocols.ids import Span
from tests.announcements import plain

VERSION = bytes(range(32))


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (["status", "--watch"], ["status", "--watch=2"]),
        (["status", "--watch", "5", "m"], ["status", "--watch", "5", "m"]),
        (["status", "--watch", "0.5"], ["status", "--watch", "0.5"]),
        (["status", "--watch", "smollm2"], ["status", "--watch=2", "smollm2"]),
        (["status", "--watch", "--json"], ["status", "--watch=2", "--json"]),
        (["status", "--watch=7"], ["status", "--watch=7"]),
        (["serve", "--watch"], ["serve", "--watch"]),
        ([], []),
    ],
    ids=lambda value: " ".join(value) or "nothing",
)
def test_the_seconds_of_watch_may_be_left_out(given: list[str], taken: list[str]) -> None:
    assert with_values(given) == taken


def server(peer_id: str, span: Span, state: ServerState = ServerState.ONLINE, name: str = "attic") -> Announcement:
    of_model = {"model_version": VERSION, "model_name": "tiny-llama", "num_blocks": 6}
    place = {"software_version": "1", "step_seconds": 0.02, "cache_tokens": 1000, "cache_tokens_free": 700}
    return plain(peer_id, span, state=state, public_name=name, **of_model, **place)


@pytest.mark.parametrize("width", [40, 79, 80, 200])
def test_picture_fits_terminal_and_says_what_is_missing(width: int) -> None:
    servers = [
        server("12D3KooWA", Span(0, 3)),
        server("12D3KooWB", Span(2, 4), name="cellar"),
        server("12D3KooWC", Span(4, 6), ServerState.JOINING),
    ]
    found = status.ModelServers("tiny-llama", VERSION, 6, tuple(servers))
    console = Console(width=width, record=True, file=io.StringIO())
    for part in status.picture([found], [], width):
        console.print(part)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "cellar" in text and "50.0" in text
    assert "nobody serves blocks 4:6" in " ".join(text.split()), text
    assert ("11111112221111000000" in text.replace(" ", "")) == (width >= 80), text  # 20 columns for 6 blocks


class Node(MemoryNode):
    async def ask_node(self, peer_id: str, *, timeout: float) -> Any:
        await trio.lowlevel.checkpoint()
        raise StreamClosed("it knows nothing of that", peer_id)


async def watched(output: Output, seconds: float, looks: int) -> None:
    """Watches a swarm in which nobody serves at first, then one server, and then two."""
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery, Node)
        servers = [network.node(Identity.generate()) for _ in range(2)]
        watching: Any = network.node()
        nursery.start_soon(status._watch, watching, None, output, seconds)
        for number in range(looks):
            await trio.sleep(seconds / 2)
            if number < len(servers):
                own = servers[number]
                own.announce(server(own.peer_id, Span(3 * number, 3 * number + 3), name=f"number{number}"))
            await trio.sleep(seconds / 2)
        nursery.cancel_scope.cancel()


@pytest.mark.virtual_time
async def test_json_has_a_line_for_each_look(capsys: pytest.CaptureFixture[str]) -> None:
    await watched(Output(True), 5.0, 3)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["model"] for line in lines[:3]] == ["", "tiny-llama", "tiny-llama"]
    assert [line["coverage"] for line in lines[:3]] == [[], [1, 1, 1, 0, 0, 0], [1] * 6]
    assert all(line["time"] > 1.7e9 and line["relays"] == [] for line in lines)


@pytest.mark.virtual_time
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
async def test_picture_changes_in_place_or_is_redrawn(terminal: bool) -> None:
    output, written = Output(False), io.StringIO()
    output.console = Console(file=written, force_terminal=terminal, width=100, height=30, soft_wrap=True)
    await watched(output, 2.0, 3)
    text = written.getvalue()
    assert text.index("nobody serves a model") < text.index("number0") < text.index("number1")
    assert ("\x1b[1A" in text) == terminal  # the cursor goes up over the picture before
    assert "every 2 s" in text
