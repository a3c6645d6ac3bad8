"""A person at a terminal: questions, Ctrl-C, /commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import Nodes
from tests.swarm.terminals import Terminal, terminal


@pytest.fixture(scope="module")
def terminals(node_starter: Nodes, shared_swarm: SharedSwarm) -> Iterator[list[Terminal]]:
    """One for each test, started side by side."""
    arguments = ("chat", "tiny-llama", "--peer", shared_swarm.peer, "--max-new-tokens", "3500")
    with ExitStack() as stack:
        yield [
            stack.enter_context(terminal(*arguments, env=node_starter.env, cwd=shared_swarm.models)) for _ in range(3)
        ]


@pytest.fixture
def chat(terminals: list[Terminal]) -> Terminal:
    opened = terminals.pop()
    opened.until("> ")
    return opened


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat: Terminal, shared_swarm: SharedSwarm) -> None:
    chat.type("/route\n")
    chat.until("no route yet")
    chat.until("> ")
    chat.type("hello\n")
    chat.until("hello\r\n")
    chat.wait_for_more()
    chat.type("\x03")
    chat.until("(stopped)")
    chat.until("> ")
    chat.type("/route\n")
    shown = chat.until("→ you")
    for node in shared_swarm.llama:
        assert node.peer_id[-8:] in shown
    chat.until("> ")
    chat.type("/new\n")
    chat.until("starting over")
    chat.until("> ")
    chat.type("and again\n")
    chat.until("and again\r\n")
    chat.wait_for_more()
    chat.type("\x03")
    chat.until("(stopped)")
    chat.until("> ")
    chat.type("/quit\n")
    assert chat.exit_code() == 0


def test_end_of_input_leaves(chat: Terminal) -> None:
    chat.type("\x04")
    assert chat.exit_code() == 0


def test_ctrl_c_at_the_prompt_leaves(chat: Terminal) -> None:
    chat.type("\x03")
    assert chat.exit_code() == 130
