"""What a conversation at a terminal decides: blocks and questions, settings, what is kept, room, and repetition."""

from __future__ import annotations

import base64
import io
import json
import os
import pty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from petalnode.crypto.identity import Identity
from petalnode.node.cli.commands.chat import question
from petalnode.node.cli.conversation import kept, reader
from petalnode.node.cli.conversation.answers import finished_blocks
from petalnode.node.cli.conversation.kept import asked_so_far, copy, kept_chat, kept_chats, listed, save_dialogue
from petalnode.node.cli.conversation.reader import QuestionReader, is_open_block, question_of, read_question
from petalnode.node.cli.conversation.settings import changed, described, for_a_person, model_settings, repeats
from petalnode.node.cli.conversation.talk import session_room
from petalnode.node.cli.terminal import LineReader
from petalnode.node.client.chat import ChatMessage, Dialogue, SavedChat, read_dialogue
from petalnode.node.client.generation.sampling import Sampling
from petalnode.node.errors import BadInput
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span
from tests.swarm.terminals import Terminal


@pytest.mark.parametrize(
    ("text", "is_open", "asked"),
    [
        ("hello", False, "hello"),
        ('"""', True, ""),
        ('"""one\ntwo', True, "one\ntwo"),
        ('"""one\ntwo"""', False, "one\ntwo"),
        ('"""\n  one\ntwo\n"""', False, "  one\ntwo"),
        ('a """ b', False, 'a """ b'),
    ],
)
def test_three_quotation_marks_are_around_a_block(text: str, is_open: bool, asked: str) -> None:
    assert is_open_block(text) is is_open
    assert question_of(text) == asked


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one\ntwo\n\n", ""),
        ("one\n\nt", ""),
        ("one\n\ntwo\n", "one\n\n"),
        ("one\n\ntwo\n\nthree\n", "one\n\ntwo\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nend\n", "```\na\n\nb\n```\n\n"),
        ("````\n```\n\nb\n", ""),
        ("1. a\n\n2. b\n\n", ""),
        ("one\n\n- a\n", "one\n\n"),
        ("1. a\n\n2. b\n\nend\n", "1. a\n\n2. b\n\n"),
        ("- a\n\n  more of it\n\n- b\n", ""),
        ("one\n\n    code\n", ""),
    ],
)
def test_block_is_finished_when_another_one_has_begun(text: str, finished: str) -> None:
    assert finished_blocks(text) == (finished, text.removeprefix(finished))


class Typed(LineReader):
    """Lines of somebody who then leaves."""

    def __init__(self, *lines: str) -> None:
        super().__init__()
        self._lines = list(lines)

    async def read(self, prompt: str) -> str | None:
        await trio.lowlevel.checkpoint()
        return self._lines.pop(0) if self._lines else None


@pytest.mark.parametrize(
    ("lines", "asked"),
    [
        (["hello", "more"], "hello"),
        (['"""one', "two", '"""', "more"], "one\ntwo"),
        (['"""one', "two"], "one\ntwo"),
        ([], None),
    ],
)
async def test_a_block_is_read_to_its_end(lines: list[str], asked: str | None) -> None:
    assert await read_question(Typed(*lines), "> ") == asked


@contextmanager
def person() -> Iterator[Terminal]:
    """At a pseudo-terminal that is this process's standard input and output."""
    from prompt_toolkit.application import create_app_session

    ours, theirs = pty.openpty()
    here: Any = SimpleNamespace(pid=os.getpid(), poll=lambda: 0, wait=lambda *_: 0)
    screen = Terminal(ours, here)
    with (
        open(theirs) as typed,
        open(os.dup(theirs), "w") as shown,
        patch.multiple("sys", stdin=typed, stdout=shown),
        patch.dict(os.environ, TERM="xterm"),
        patch.object(reader, "_LEAVING", 600.0),
        create_app_session(),
    ):
        yield screen
    screen.close()


CTRL_C, ENTER, PROMPT = "\x03", "\r", ">\x08"
WARNING = "Ctrl-C again or Ctrl-D leaves"


async def see(screen: Terminal, text: str) -> None:
    await trio.to_thread.run_sync(screen.until, text)


async def test_ctrl_c_clears_twice_leaves_letters_cancel() -> None:
    asked: list[str | None] = []

    async def ask(reader: QuestionReader) -> None:
        asked.append(await reader.read("> "))

    with person() as screen:
        before = screen.modes()
        questions = QuestionReader(["an earlier question"])
        with questions:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, questions)
                await see(screen, PROMPT)
                screen.type(f"half{CTRL_C}")
                await see(screen, WARNING)
                screen.type("x")
                await see(screen, "x")
                screen.type(CTRL_C)
                await see(screen, WARNING)
                screen.type(f"whole{ENTER}")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, questions)
                await see(screen, PROMPT)
                screen.type(f"\x1b[A\x1b[A{ENTER}")  # up, over the newest question
            assert asked == ["whole", "an earlier question"]
            with pytest.RaisesGroup(KeyboardInterrupt):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask, questions)
                    await see(screen, PROMPT)
                    screen.type(CTRL_C)
                    await see(screen, WARNING)
                    screen.type(CTRL_C)
        assert len(asked) == 2 and screen.modes() == before
        assert "\x1b[6n" not in screen.shown  # asked where its cursor is, a terminal answers as if that were typed


async def test_abandoned_question_leaves_the_terminal_as_before() -> None:
    with person() as screen:
        before = screen.modes()
        questions = QuestionReader()
        with questions:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(questions.read, "> ")
                await see(screen, PROMPT)
                screen.type("half")
                await see(screen, "half")
                nursery.cancel_scope.cancel()
        await trio.to_thread.run_sync(questions._idle.wait, 60.0)  # prompt_toolkit has left, at the latest
        assert screen.modes() == before


@given(st.text("a \n`-1.~", max_size=40))
def test_blocks_are_the_text_and_finished_ones_stay(text: str) -> None:
    finished, rest = finished_blocks(text)
    assert finished + rest == text
    assert finished_blocks(f"{text}more\n")[0].startswith(finished)


def test_circling_answer_is_found_and_lists_are_not() -> None:
    assert repeats([7] * 80) and not repeats([7] * 79)
    assert repeats([1, 2, 3] * 27) and repeats(list(range(500)) + [1, 2, 3] * 27)
    assert repeats(list(range(64)) * 4) and not repeats(list(range(65)) * 9)
    assert not repeats(list(range(64)) * 3) and not repeats([5] * 40 + [6] + [5] * 40)
    assert not repeats([token for number in range(300) for token in (1, number + 10, 2)]) and not repeats([])


def test_named_value_precedes_the_models_and_the_usual(tmp_path: Path) -> None:
    given = Sampling(max_new_tokens=9, seed=3)
    assert for_a_person(given, {}, tmp_path) == replace(given, temperature=0.7)
    own = {"temperature": 0.6, "top_k": 20, "top_p": 2.0, "min_p": "much", "repetition_penalty": 1.1, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    sampling = for_a_person(given, {"temperature": None, "top_p": 0.5}, tmp_path)
    assert sampling == replace(given, temperature=0.6, top_k=20, top_p=0.5, repetition_penalty=1.1)
    assert for_a_person(given, {"top_p": None}, tmp_path).top_p == 1.0  # 2 is out of range
    assert for_a_person(given, {"temperature": 0.0}, tmp_path) == given  # greedy is greedy
    for text in ("", "[1]", "{" * 99, '{"temperature": true}', '{"temperature": 1e400}', '{"temperature": NaN}'):
        (tmp_path / "generation_config.json").write_text(text)
        assert for_a_person(given, {}, tmp_path) == replace(given, temperature=0.7), text
    assert model_settings(tmp_path / "none") == {}


def test_settings_are_changed_by_name() -> None:
    sampling = changed(Sampling(), ["temperature", "0.5"])
    sampling = changed(changed(sampling, ["max-new-tokens", "7"]), ["seed", "3"])
    assert (sampling.temperature, sampling.max_new_tokens, sampling.seed) == (0.5, 7, 3)
    assert changed(sampling, ["seed", "none"]).seed is None
    assert "temperature 0.5" in described(sampling) and "logit_bias" not in described(sampling)
    for words in (
        ["temperature"],
        ["colour", "red"],
        ["logit_bias", "1"],
        ["top_k", "0.5"],
        ["top_p", "7"],
        ["seed", "9" * 20],
        [],
    ):
        with pytest.raises(BadInput):
            changed(sampling, words)


def test_conversation_is_as_long_as_blocks_allow() -> None:
    server = Announcement(
        "a", b"v" * 32, "m", 4, Span(0, 4), ServerState.ONLINE, cache_tokens_free=9000, cache_tokens=1
    )
    short = replace(server, peer_id="b", span=Span(2, 4), cache_tokens_free=20000)
    assert session_room([server], 4) == 9000 and session_room([server, short], 4) == 9000
    assert session_room([replace(server, max_session_length=8192)], 4) == 8192
    assert session_room([short], 4) == 0 and session_room([], 4) == 0
    assert session_room([replace(server, state=ServerState.DRAINING)], 4) == 0


def chat_of(*questions: str, model: str = "tiny") -> SavedChat:
    dialogue = Dialogue()
    for asked in questions:
        dialogue = dialogue.plus("user", asked).plus("assistant", "yes")
    return SavedChat(Identity.generate(), dialogue=dialogue, model=model)


def test_conversations_are_kept_newest_first_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEPT", replace(kept.KEPT, chats=3))
    monkeypatch.setattr(kept, "kept_folder", lambda: tmp_path / "chats")
    for number in range(4):
        with kept_chat(None) as (saved, path):
            chat_of(f"question {number}", "more").save(path)
            os.utime(path, (number, number))
    with kept_chat(None):
        pass  # nobody asked anything
    (tmp_path / "chats" / "broken.json").write_text("{")
    found, damaged = kept_chats(tmp_path / "chats")
    assert [chat.title for chat in found] == ["question 3", "question 2"]
    assert damaged == [tmp_path / "chats" / "broken.json"]
    assert len(list((tmp_path / "chats").glob("*.lock"))) <= 3
    assert "tiny, 2 questions: question 3" in listed(found)[0] and len(listed(found)) == 2
    assert [chat.title for chat in kept_chats(tmp_path / "chats", 2)[0]] == ["question 3"]  # the newest file is broken
    monkeypatch.setattr(kept, "KEPT", replace(kept.KEPT, shown=1))
    assert listed(found)[1:] == ["     older ones have the numbers 2 to 2"]
    with kept_chat(found[1].path) as (saved, path):
        assert saved.dialogue.questions == 2 and path == found[1].path
    long = replace(found[0], saved=chat_of("word\n" * 100))
    assert "  org/tiny, 1 q" in listed([replace(long, saved=chat_of("?", model="org/tiny"))])[0]
    assert "  tiny.gguf, 1 q" in listed([replace(long, saved=chat_of("?", model=str(tmp_path / "tiny.gguf")))])[0]
    assert len(long.title) == kept.KEPT.title and long.title.endswith("…")


def test_a_number_of_questions_is_said_in_words() -> None:
    assert [asked_so_far(chat_of(*"?" * count).dialogue) for count in (0, 1, 2)] == [
        "0 questions",
        "1 question",
        "2 questions",
    ]


def test_answer_is_copied_by_program_or_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "OSC 52" in copy("né")
    assert base64.b64encode("né".encode()).decode() in capsys.readouterr().out
    with pytest.raises(BadInput, match="/save FILE"):
        copy("a" * (kept.KEPT.clipboard + 1))
    for name, script in (
        ("wl-copy", "exit 1"),
        ("xclip", f"while read -r line; do echo $line; done > {tmp_path}/held"),
    ):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert ("OSC 52" if name == "wl-copy" else "xclip") in copy("one\ntwo\n")
    assert (tmp_path / "held").read_text() == "one\ntwo\n"


def test_only_what_is_written_can_be_read(tmp_path: Path) -> None:
    dialogue = Dialogue().plus("system", "short").plus("user", "hé\n?").plus("assistant", "yes")
    for name in ("a.json", "b"):
        save_dialogue(tmp_path / name, dialogue)
        assert read_dialogue(tmp_path / name) == dialogue
    save_dialogue(tmp_path / "c.md", dialogue)
    assert "**user**\n\nhé\n?" in (tmp_path / "c.md").read_text()
    chat_of("hi").save(tmp_path / "d.json")
    assert read_dialogue(tmp_path / "d.json").turns[0] == ChatMessage("user", "hi")
    user = {"role": "user", "content": "hi"}
    for turns in (
        [user, user],
        [{"role": "assistant", "content": "hi"}],
        [user | {"content": [1]}],
        7,
        [{"role": "user"}],
    ):
        (tmp_path / "e.json").write_text(json.dumps({"messages": turns}))
        with pytest.raises(BadInput):
            read_dialogue(tmp_path / "e.json")
    for path in (tmp_path / "none", tmp_path, tmp_path / "c.md"):
        with pytest.raises(BadInput):
            read_dialogue(path)


class Piped(io.TextIOWrapper):
    """Standard input as a pipe that has these bytes."""

    def __init__(self, data: bytes, errors: str = "strict") -> None:
        reading, writing = os.pipe()
        os.write(writing, data)
        os.close(writing)
        super().__init__(os.fdopen(reading, "rb"), encoding="utf-8", errors=errors)


def test_a_pipe_follows_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    for prompt, data, asked in (("sum", b" text\n", "sum\n\ntext"), ("sum", b"", "sum"), (None, b"text", "text")):
        monkeypatch.setattr("sys.stdin", Piped(data))
        assert question(prompt) == asked
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert question("sum") == "sum"


@pytest.mark.parametrize(
    ("data", "errors"), [(b"\x7fELF\x02\x00", "strict"), (b"\xff\xd8", "strict"), (b"\xff", "surrogateescape")]
)
def test_bytes_that_are_no_text_are_refused(data: bytes, errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for prompt in (None, "what is this"):
        monkeypatch.setattr("sys.stdin", Piped(data, errors))
        with pytest.raises(BadInput, match="no text"):
            question(prompt)
