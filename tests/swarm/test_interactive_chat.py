"""A person at a terminal: questions, pastes, Ctrl-C, /commands, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import Nodes, environment, petalnode
from tests.swarm.terminals import Terminal, terminal

PASTES, NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"
"""The terminal is told to mark what is pasted, or not: the latter by prompt_toolkit after each question."""
DRAWING, DRAWN = "\x1b[?25l", "\x1b[?25h"
PASTE = "\x1b[200~first line\nsecond line\x1b[201~"
CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"


def chat_of(swarm: SharedSwarm, *options: str) -> tuple[str, ...]:
    return ("chat", "tiny-llama", "--peer", swarm.peer, "--seed", "0", *options)


@pytest.fixture(scope="module")
def terminals(node_starter: Nodes, shared_swarm: SharedSwarm) -> Iterator[list[Terminal]]:
    """One for each test, started side by side."""
    arguments = chat_of(shared_swarm, "--max-new-tokens", "3500")
    with ExitStack() as stack:
        yield [
            stack.enter_context(terminal(*arguments, env=node_starter.env, cwd=shared_swarm.models)) for _ in range(3)
        ]


@pytest.fixture
def chat(terminals: list[Terminal]) -> Terminal:
    opened = terminals.pop()
    ready(opened)
    return opened


def ready(chat: Terminal) -> None:
    """Waits for the prompt, behind which the cursor goes on by itself."""
    chat.until(">\x08")


def enter(chat: Terminal, text: str) -> None:
    chat.type(text + ENTER)
    chat.until(NO_PASTES)


def command(chat: Terminal, text: str, shown: str) -> None:
    """Enters it, and waits for what is `shown` and the next prompt."""
    enter(chat, text)
    chat.until(shown)
    ready(chat)


def test_ctrl_c_stops_answer_and_not_chat(chat: Terminal, shared_swarm: SharedSwarm) -> None:
    command(chat, "/route", "no route yet")
    enter(chat, "hello")
    chat.until(DRAWING)  # the answer is being drawn
    chat.wait_for_more()
    chat.type(CTRL_C)
    chat.until("(stopped)")
    ready(chat)
    enter(chat, "/route")
    shown = chat.until("→ you")
    for node in shared_swarm.llama:
        assert node.peer_id[-8:] in shown
    ready(chat)
    command(chat, "/new", "starting over")
    enter(chat, "/quit")
    assert chat.exit_code() == 0


def test_ctrl_c_clears_line_and_second_one_leaves(chat: Terminal) -> None:
    chat.type("half a question")
    chat.until("question")
    chat.type(CTRL_C)
    chat.until("Ctrl-C again or Ctrl-D leaves")
    enter(chat, "/set top_k")  # what was cleared is no part of it, and Ctrl-C counts anew
    chat.until("/set NAME VALUE")
    ready(chat)
    chat.type(CTRL_C)
    chat.until("Ctrl-C again or Ctrl-D leaves")
    chat.type(CTRL_C)
    assert chat.exit_code() == 130


def test_end_of_input_leaves_terminal_as_it_was(chat: Terminal) -> None:
    during = chat.modes()
    chat.type(CTRL_D)
    assert chat.exit_code() == 0
    assert chat.shown.rindex(NO_PASTES) > chat.shown.rindex(PASTES)
    assert chat.modes() != during


def test_pastes_and_typed_ahead_lines_are_own_questions(
    shared_swarm: SharedSwarm, node_starter: Nodes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("person")
    env = environment(home)
    with terminal(*chat_of(shared_swarm, "--max-new-tokens", "60"), env=env, cwd=shared_swarm.models) as chat:
        ready(chat)
        enter(chat, PASTE)
        chat.until(DRAWING)
        chat.type(f'"""{ENTER}')  # while the answer comes: not shown in it
        answer = chat.until(DRAWN)
        assert '"""' not in answer
        chat.until('"""')
        command(chat, f'in{ENTER}a block{ENTER}"""', DRAWING)
        command(chat, "/save said.json", "written to")
        command(chat, "/set temperature 0", "temperature 0.0")
        chat.type(CTRL_D)
        assert chat.exit_code() == 0
    (kept,) = home.rglob("chats/*.json")
    turns = json.loads(kept.read_text())["turns"]
    assert [turn for turn in turns if turn[0] == "user"] == [
        ["user", "first line\nsecond line"],
        ["user", "in\na block"],
    ]
    assert kept.stat().st_mode & 0o077 == 0 and kept.parent.stat().st_mode & 0o077 == 0
    (saved,) = shared_swarm.models.glob("said.json")
    assert [[turn["role"], turn["content"]] for turn in json.loads(saved.read_text())["messages"]] == turns
    saved.unlink()

    # From the list, without naming the model; what was said before comes back by the arrow key.
    with terminal("chat", "--peer", shared_swarm.peer, "--resume", env=env, cwd=shared_swarm.models) as chat:
        assert "first line second line" in chat.until("which one? [1-1] ")
        chat.type("1\n")
        past = chat.until("going on after 2 questions").replace("\r", "")
        assert "> first line\nsecond line\n" in past and "> in\na block\n" in past
        ready(chat)
        chat.type("\x1b[A")
        chat.until("a block")
        chat.type(CTRL_C + CTRL_D)
        chat.until("--resume` goes on with it")
        assert chat.exit_code() == 0
    # A script goes on with it, too.
    outcome = petalnode(
        *("chat", "--peer", shared_swarm.peer, "--resume", "1", "--prompt", "three", "--max-new-tokens", "3", "--json"),
        env=env,
        cwd=shared_swarm.models,
        given="from a pipe",
    )
    assert outcome.code == 0, outcome
    turns = json.loads(kept.read_text())["turns"]
    assert turns[-2] == ["user", "three\n\nfrom a pipe"]


def test_another_model_goes_on_with_the_conversation(shared_swarm: SharedSwarm, node_starter: Nodes) -> None:
    arguments = chat_of(shared_swarm, "--max-new-tokens", "3", "--no-keep")
    with terminal(*arguments, env=node_starter.env, cwd=shared_swarm.models) as chat:
        ready(chat)
        command(chat, "hello", DRAWN)
        enter(chat, "/model")
        assert chat.until("\r\n\r\n").count("tiny-") == 3
        ready(chat)
        command(chat, "/model no-such-model", "Talking to tiny-llama")
        enter(chat, "/model other-llama")  # nobody serves it, but it is on this machine
        chat.until("Talking to other-llama")
        chat.until("going on after 1 question")
        ready(chat)
        chat.type(CTRL_D)
        assert chat.exit_code() == 0
