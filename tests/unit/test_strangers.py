"""What `chat` says before its first prompt to strangers, to whom, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import typer

from petalnode.crypto.identity import Identity
from petalnode.node.cli import dialogue
from petalnode.node.cli.dialogue import Chatter
from petalnode.node.cli.output import Output
from petalnode.node.cli.strangers import StrangerNotice, TrustedOptions, notices_file
from petalnode.node.errors import BadInput
from petalnode.node.network.transport.raw_connection import Path as Way
from petalnode.node.swarm.trusted_servers import TrustedServers
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span

FAR = "/ip4/192.0.2.7/tcp/1"
HERE = "/ip4/127.0.0.1/tcp/1"
SERVER = Announcement("stranger", b"v" * 32, "tiny", 6, Span(0, 6), ServerState.ONLINE, addrs=(FAR,))


class Person:
    """In place of the reader of a terminal."""

    def __init__(self, *lines: str | None) -> None:
        self._lines = list(lines)
        self.asked: list[str] = []

    async def read(self, prompt: str) -> str | None:
        self.asked.append(prompt)
        return self._lines.pop(0)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


def client_of(
    servers: list[Announcement], ways: Sequence[tuple[Way, str | None]] = (), trusted: TrustedServers | None = None
) -> Any:
    """With connections of these ways, from these addresses of its own, to every server."""
    connections = [SimpleNamespace(path=way, local_host=host) for way, host in ways]
    host = SimpleNamespace(connections=lambda peer_id: connections)

    async def candidates() -> None:
        await trio.lowlevel.checkpoint()

    return SimpleNamespace(
        model=SimpleNamespace(name="tiny", num_blocks=6),
        trusted=trusted or TrustedServers(),
        swarm=SimpleNamespace(host=host),
        servers=lambda: tuple(servers),
        candidates=candidates,
    )


def ask(client: Any, file: Path, *answers: str | None, asks: bool = True, as_json: bool = False, **options: Any) -> Any:
    """(whether the prompt may go out, how often the person was asked)."""
    person = Person(*answers)
    notice = StrangerNotice(client, Output(as_json), file, asks=asks, **options)
    permitted = trio.run(notice.permits, person)
    return permitted, len(person.asked)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return notices_file(tmp_path / "data")


@pytest.mark.parametrize("yes", ["y", " YES "])
def test_a_person_is_told_and_asked_once(yes: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(client_of([SERVER]), file, yes) == (True, 1)
    said = capsys.readouterr().out
    assert "tiny is served by one server of people whom you have not named" in said
    assert "first blocks can read what you ask" in said and "what is answered" in said and "--trusted" in said
    assert ask(client_of([SERVER, SERVER]), file) == (True, 0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("no", ["", "n", "maybe", None])
def test_disagreeing_person_is_asked_again_next_time(no: str | None, file: Path) -> None:
    assert ask(client_of([SERVER]), file, no) == (False, 1)
    assert not file.exists()
    assert ask(client_of([SERVER]), file, "y") == (True, 1)


@pytest.mark.parametrize("as_json", [True, False])
def test_script_is_told_on_standard_error(as_json: bool, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # whether anybody has read it, nobody knows
        assert ask(client_of([SERVER]), file, asks=False, as_json=as_json) == (True, 0)
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1 and "--yes" in shown.err
    assert not file.exists()


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("options", [{"yes": True}, {"private": True}, {"named": ["stranger"]}])
def test_who_knows_is_not_told(
    asks: bool, options: dict[str, Any], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(client_of([SERVER]), file, asks=asks, **options) == (True, 0)
    assert capsys.readouterr() == ("", "")
    assert not file.exists()


def way(addr: str | None, relay: str | None = None, *, inbound: bool = False) -> Way:
    return Way(relay is None, relay, addr, inbound)


@pytest.mark.parametrize(
    ("ways", "announced", "stranger"),
    [
        ([(way(HERE), "127.0.0.1")], FAR, False),
        ([(way("/ip4/10.0.0.5/tcp/1"), "10.0.0.5")], FAR, False),  # over the network card, to ourselves
        ([(way("/ip6/::1/tcp/1"), "::1")], FAR, False),
        ([], HERE, False),
        ([], FAR, True),
        ([(way("/ip4/10.0.0.5/tcp/1"), "10.0.0.6")], FAR, True),
        ([(way(FAR), "10.0.0.6")], HERE, True),  # it announces what it is not
        ([(way(HERE), "127.0.0.1"), (way(FAR), "10.0.0.6")], HERE, True),
        ([(way(HERE, "a relay here"), None)], HERE, True),
        ([(way(None, inbound=True), None)], HERE, True),
    ],
)
def test_servers_on_this_machine_are_no_strangers(
    ways: list[tuple[Way, str | None]], announced: str, stranger: bool, file: Path
) -> None:
    client = client_of([replace(SERVER, addrs=(announced,))], ways)
    assert ask(client, file, "y") == (True, int(stranger))


def test_server_that_announces_no_address_is_stranger(file: Path) -> None:
    assert ask(client_of([replace(SERVER, addrs=())]), file, "y") == (True, 1)


def test_with_trusted_servers_the_middle_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trusted = TrustedServers(frozenset({"own"}), 2)
    own = replace(SERVER, peer_id="own")
    assert ask(client_of([SERVER, own], trusted=trusted), file, "y", named=["own"]) == (True, 1)
    assert "blocks 2:4 of tiny are computed by one server" in capsys.readouterr().out
    only_ends = [replace(SERVER, span=Span(0, 2)), own]
    file.unlink()
    assert ask(client_of(only_ends, trusted=trusted), file, named=["own"]) == (True, 0)


PEER = Identity.generate().peer_id


@pytest.mark.parametrize(
    ("options", "limits", "said"),
    [
        (TrustedOptions(trusted=["my server"]), {}, "--trusted my server: this is no peer id"),
        (TrustedOptions(trusted_blocks=3), {}, "need trusted servers"),
        (TrustedOptions(trusted=[PEER]), {"blocked": [PEER]}, "may not be used"),
        (TrustedOptions(trusted=[PEER]), {"allowed": ["another"]}, "may not be used"),
    ],
)
def test_options_that_contradict_each_other(options: TrustedOptions, limits: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        options.trusted_servers(**limits)


def test_options_make_trusted_servers() -> None:
    assert TrustedOptions().trusted_servers() == TrustedServers()
    options = TrustedOptions(trusted=[PEER], trusted_blocks=4)
    assert options.trusted_servers(allowed=[PEER]) == TrustedServers(frozenset({PEER}), 4)


def test_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no folder")
    assert ask(client_of([SERVER]), notices_file(tmp_path / "data"), "y") == (True, 1)


def chatting(client: Any, file: Path, person: Person, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions that went out when this person sat at a chat."""
    answered: list[str] = []

    class Listening(Chatter):
        async def answer(self, question: str) -> None:
            answered.append(question)

    monkeypatch.setattr(dialogue, "LineReader", lambda: person)
    nothing: Any = None
    output = Output(False)
    notice = StrangerNotice(client, output, file, asks=True)
    trio.run(Listening(nothing, nothing, nothing, output, None, [], notice=notice).loop, "tiny")
    return answered


def test_who_says_no_leaves_before_anything_is_typed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(typer.Exit) as left:
        chatting(client_of([SERVER]), file, Person("n"), monkeypatch)
    assert left.value.exit_code == 1


def test_later_strangers_are_told_before_the_prompt(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [replace(SERVER, addrs=(HERE,))]

    class Typing(Person):
        async def read(self, prompt: str) -> str | None:
            if self._lines[0] == "they come":
                self._lines.pop(0)
                servers.append(SERVER)
            return await super().read(prompt)

    person = Typing("first", "they come", "held back", "n", "sent", "y", "sent too", "/quit")
    assert chatting(client_of(servers), file, person, monkeypatch) == ["first", "sent", "sent too"]
    assert sum("Go on?" in prompt for prompt in person.asked) == 2
