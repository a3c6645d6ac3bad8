"""`chat --session FILE`: a conversation goes on in another process."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from petalnode.node.cli import process
from petalnode.node.cli.dialogue import Chatter
from petalnode.node.cli.output import Output
from petalnode.node.client.chat import ChatMessage, held_chat
from petalnode.node.client.deadlines import Waits
from petalnode.node.client.generation.conversation import Sampling
from petalnode.node.client.generation.drafting import DraftPlan
from petalnode.node.client.session.chain import Interruption
from petalnode.node.errors import BadInput, MachineError, ServerFailed
from petalnode.node.swarm.routing import Hop
from petalnode.protocols.ids import Span
from tests.full_disk import full_disk
from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import environment, petalnode


def ask(swarm: SharedSwarm, file: Path, question: str, *options: str) -> dict[str, object]:
    outcome = petalnode(
        *("chat", str(swarm.folder), "--peer", swarm.peer, "--session", str(file), "--prompt", question),
        *("--json", "--max-new-tokens", "6", *options),
        env=environment(file.parent),
    )
    assert outcome.code == 0, outcome
    return outcome.objects[0]


def test_the_next_process_takes_the_session_up(shared_swarm: SharedSwarm, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    first = ask(shared_swarm, file, "one two")
    assert first["reused"] == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    held = len(json.loads(file.read_text())["tokens"])
    second = ask(shared_swarm, file, "three")
    assert second["reused"] == held  # nothing of it was sent again
    # The same two questions without the servers' memory give the same answers.
    other = tmp_path / "other.json"
    assert ask(shared_swarm, other, "one two")["text"] == first["text"]
    saved = json.loads(other.read_text())
    other.write_text(json.dumps(saved | {"session": None, "tokens": []}))
    again = ask(shared_swarm, other, "three")
    assert (again["reused"], again["text"]) == (0, second["text"])


def test_session_that_servers_forgot_is_filled_from_tokens(shared_swarm: SharedSwarm, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    ask(shared_swarm, file, "one two")
    saved = json.loads(file.read_text())
    saved["session"]["links"][0][4] = bytes(16).hex()  # another epoch: the server was restarted since
    file.write_text(json.dumps(saved))
    answer = ask(shared_swarm, file, "three")
    assert answer["reused"] == 0


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": "petalnode-chat/1"}'])
def test_a_file_that_is_no_conversation_is_refused(shared_swarm: SharedSwarm, tmp_path: Path, content: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(content)
    outcome = petalnode(
        *("chat", str(shared_swarm.folder), "--peer", shared_swarm.peer, "--session", str(file), "--prompt", "hi"),
        env=environment(tmp_path),
    )
    assert outcome.code == 2
    assert "is no saved conversation" in outcome.err
    assert "Traceback" not in outcome.err
    assert file.read_text() == content


class FakeConversation:
    """Gives out the tokens of `answers` one by one, and raises what stands between them."""

    max_length, recoveries, reused, route, codec = 1000, 0, 0, (), "none"
    is_open, interruption, waits, compared_routes, drafting = True, None, Waits(), (), DraftPlan()

    def __init__(self, *answers: list[int | Exception]) -> None:
        self.answers = list(answers)
        self.asked: list[list[int]] = []

    async def answer(self, tokens: list[int], sampling: object, on_token: Any, stop: object, **_: object) -> list[int]:
        self.asked.append(tokens)
        for token in self.answers.pop(0):
            if isinstance(token, Exception):
                raise token
            on_token(token)
        return []

    def state(self) -> tuple[list[int], None]:
        return [], None


class Letters:
    """A tokenizer of one token per letter."""

    def tokenize(self, turns: Sequence[ChatMessage]) -> list[int]:
        return [ord(letter) for turn in turns for letter in f"{turn.role[0]}{turn.content}"]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def stream(self) -> Letters:
        return self

    def add(self, token: int) -> str:
        return chr(token)


def chatter(file: Path, *answers: list[int | Exception], prompt: str | None = None) -> tuple[Any, FakeConversation]:
    conversation = FakeConversation(*answers)
    with held_chat(file) as saved:
        talk: Any = Chatter(
            conversation,  # type: ignore[arg-type]
            Letters(),  # type: ignore[arg-type]
            Sampling(),
            Output(False),
            saved,
            [],
            session_file=file,
            once=prompt is not None,
        )
        return talk, conversation


LOST = ServerFailed("the server …abc is gone", "abc")


async def test_question_and_part_stay_when_the_server_dies(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    talk, _ = chatter(file, [ord("o"), ord("k")], [ord("p"), ord("a"), LOST])
    await talk.answer("first")
    with pytest.raises(ServerFailed):
        await talk.answer("second")
    turns = [["user", "first"], ["assistant", "ok"], ["user", "second"], ["assistant", "pa"]]
    saved = json.loads(file.read_text())
    assert (saved["turns"], saved["unfinished"], saved["session"]) == (turns, True, None)

    again, conversation = chatter(file, [ord("y")], [ord("z")])
    await again.obey("/retry")  # the same question, without what came of its answer
    assert conversation.asked[0] == Letters().tokenize([ChatMessage(*turn) for turn in turns[:3]])
    saved = json.loads(file.read_text())
    assert (saved["turns"][2:], saved["unfinished"]) == ([["user", "second"], ["assistant", "y"]], False)


async def test_unanswered_question_is_kept_out_of_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.json"
    talk, conversation = chatter(file, [LOST], [ord("y")])
    await talk.obey("lost question")
    assert "…abc is gone" in capsys.readouterr().err
    assert json.loads(file.read_text())["turns"] == [["user", "lost question"]]
    await talk.obey("next")
    assert conversation.asked[-1] == Letters().tokenize([ChatMessage("user", "next")])
    assert json.loads(file.read_text())["turns"] == [["user", "next"], ["assistant", "y"]]


async def test_system_prompt_is_that_of_kept_conversation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.json"
    talk, _ = chatter(file, [ord("y")])
    await talk.obey("/system be brief")
    await talk.obey("hi")
    again, _ = chatter(file)
    capsys.readouterr()
    await again.obey("/system")
    assert capsys.readouterr().out == "(system prompt: be brief)\n"
    await again.obey("/new")
    assert again.dialogue.turns == (ChatMessage("system", "be brief"),)


async def test_path_of_an_unknown_home_is_refused(tmp_path: Path) -> None:
    talk, _ = chatter(tmp_path / "chat.json")
    for command in ("save", "load"):
        with pytest.raises(BadInput, match="~no-such-person/said"):  # which a chat at a terminal says, and goes on
            await talk.obey(f"/{command} ~no-such-person/said")


async def test_a_disk_that_becomes_full_ends_no_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk, _ = chatter(tmp_path / "chat.json", [ord("y")])
    with full_disk():
        await talk.obey("hi")
    shown = capsys.readouterr()
    assert shown.out == "y\n" and "File too large" in shown.err
    once, _ = chatter(tmp_path / "chat.json", [ord("y")], prompt="hi")
    with full_disk(), pytest.raises(MachineError, match="File too large"):  # one answer, and a script reads the code
        await once.answer("hi")
    assert capsys.readouterr().out == "y\n"


HOP = Hop("12D3KooWlost1234", Span(0, 6))
GONE = Interruption(HOP, True, "server 12D3KooWlost1234 (blocks 0:6) has closed the connection", 0.0, 30.0)


class Interrupted(FakeConversation):
    """Its only server is gone for 7 s."""

    interruption: Interruption | None = None

    async def answer(self, tokens: list[int], sampling: object, on_token: Any, stop: object, **_: object) -> list[int]:
        on_token(ord("a"))
        self.interruption = GONE
        await trio.sleep(7)
        self.interruption = None
        await trio.sleep(1)
        on_token(ord("b"))
        return []


def hear(
    conversation: FakeConversation,
    as_json: bool,
    capsys: pytest.CaptureFixture[str],
    *,
    closed: bool = False,
    linked: bool = False,
) -> tuple[str, str]:
    talk = Chatter(
        conversation,  # type: ignore[arg-type]
        Letters(),  # type: ignore[arg-type]
        Sampling(),
        Output(as_json),
        None,
        [],
        once=True,
        serve_options="tiny --peer /x",
        is_closed=lambda hop: closed and hop == HOP,
        link_without=lambda peer_id: "petalnode join petalnode:aeaq" if linked and peer_id == HOP.peer_id else "",
    )
    trio.run(talk.answer, "hi", clock=trio.testing.MockClock(autojump_threshold=0))
    shown = capsys.readouterr()
    return shown.out, shown.err


def test_lost_server_is_named_with_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = hear(Interrupted(), False, capsys)
    assert out == "ab\n"
    lost, advice, back = err.splitlines()
    assert lost == "lost a server: server …lost1234 (blocks 0:6) has closed the connection"
    assert "waits up to 30 s" in advice and advice.endswith("petalnode serve tiny --peer /x --blocks 0:6")
    assert back == "going on after 7.2 s" or back.startswith("going on after 7")
    out, err = hear(Interrupted(), True, capsys)
    lost_event, back_event, answer = map(json.loads, out.splitlines())
    assert lost_event == {
        "event": "server-lost",
        "peer_id": HOP.peer_id,
        "blocks": [0, 6],
        "reason": GONE.reason,
        "waits_seconds": 30.0,
        "advice": "start another server of them: petalnode serve tiny --peer /x --blocks 0:6",
    }
    assert back_event["event"] == "server-replaced" and 7 <= back_event["seconds"] < 8
    assert answer["text"] == "ab"


def test_trusted_only_blocks_do_not_ask_for_strangers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, err = hear(Interrupted(), False, capsys, closed=True)
    assert "or another one that you trust serves blocks 0:6" in err and "start another server" not in err
    assert "start this server again, on its machine: petalnode serve tiny --peer /x --blocks 0:6" in err


def test_who_could_help_is_sent_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = hear(Interrupted(), False, capsys, linked=True)
    assert err.splitlines()[1].endswith("--blocks 0:6; or send somebody: petalnode join petalnode:aeaq")
    _, err = hear(Interrupted(), False, capsys, linked=True, closed=True)
    assert "petalnode join" not in err


class Silent(FakeConversation):
    """Nobody takes the session for a while; then the server takes its time."""

    is_open = False

    async def answer(self, tokens: list[int], sampling: object, on_token: Any, stop: object, **_: object) -> list[int]:
        await trio.sleep(8)
        self.is_open, self.interruption = True, replace(GONE, lost=False, reason="", since=trio.current_time())
        await trio.sleep(5)
        on_token(ord("b"))
        return []


def test_silence_is_explained_on_standard_error_only(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = hear(Silent(), True, capsys)
    assert len(out.splitlines()) == 1
    waiting, silent = err.splitlines()
    assert waiting.startswith("no server has taken the conversation yet") and "is silent" in silent


def test_start_is_silent_briefly_then_says_each_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = process.Start()
    monkeypatch.setattr(process, "_QUIET", 1e6)  # it does not pass, however slow this machine is
    start.stage("starting")
    start.done()
    assert not capsys.readouterr().err
    monkeypatch.setattr(process, "_QUIET", 0.0)
    start.stage("starting")
    start.stage("joining the swarm")
    start.done()
    assert capsys.readouterr().err == "starting ...\njoining the swarm ...\n"
