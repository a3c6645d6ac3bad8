"""Accidents in the middle of the work of a command: its exit code, one line that can be read, and nothing lost.

The commands run in this process, on servers of their own; an accident happens at a token or at a step of a training,
and is over before the command goes on. So nothing depends on how fast anything is.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trio

from petalnode.crypto.identity import held_identity
from petalnode.node.blocks import client_part
from petalnode.node.cli import app as command_line
from petalnode.node.cli import node_report, process
from petalnode.node.cli.commands import tune
from petalnode.node.cli.dialogue import Chatter
from petalnode.node.cli.output import Output
from petalnode.node.client import swarm_model
from petalnode.node.models import resolve
from petalnode.node.validator import prober
from petalnode.node.validator.service import Validator
from tests.connections import free_port
from tests.full_disk import full_disk
from tests.swarm.processes import Node, Nodes, environment

ENDED = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "stopped by SIGTERM")}
ENDED[signal.SIGHUP] = (129, "stopped by SIGHUP")

ROOM = ("--cache-tokens", "100000", "--drain-timeout", "0")
"""A server keeps the sessions of saved conversations, and nobody moves them when it ends."""


NODES = {
    "bootstrap": "bootstrap --peer {peer} --listen /ip4/127.0.0.1/tcp/0 --remember",
    "serve": "serve tiny-llama --peer {peer} --listen /ip4/127.0.0.1/tcp/0 --remember --blocks 0:1 --throughput 1 "
    "--cache-tokens 100 --drain-timeout 0",
    "validate": "validate tiny-llama --peer {peer} --listen /ip4/127.0.0.1/tcp/0 --remember --interval 1000000",
    "api": "api tiny-llama --peer {peer} --http-port 0 --remember",
}
"""Commands that run until they are stopped."""


def _end_of(command: str) -> tuple[int, str]:
    """Exit code and last line after Ctrl-C; nobody is served by the server."""
    return (0, "done: nobody was served any more") if command == "serve" else (130, "petalnode: interrupted")


@dataclass
class Person:
    """Somebody at a terminal with a server to talk to."""

    folder: Path
    server: Node
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def run(self, *arguments: str) -> tuple[int, list[str], list[str]]:
        """The exit code of a command, and the lines of its standard output and of its errors."""
        with self.monkeypatch.context() as here:
            here.setattr(sys, "stdin", io.StringIO(""))
            code = command_line.run(list(arguments))
        shown = self.capsys.readouterr()
        assert "Traceback" not in shown.err
        errors = [line for line in shown.err.splitlines() if line.startswith("petalnode: ")]
        # A server that is told to end by a signal says so, and has done what it should.
        assert len(errors) == (code != 0) or (not code and "stopped by" in errors[0]), shown
        return code, shown.out.splitlines(), shown.err.splitlines()

    def chat(self, *options: str) -> tuple[int, list[str], list[str]]:
        where = ("--peer", self.server.address, "--session", "chat.json", "--max-new-tokens", "200")
        return self.run("chat", "tiny-llama", *where, "--prompt", "one two", *options)

    def tune(self, *options: str) -> tuple[int, list[str], list[str]]:
        Path("data.jsonl").write_text('{"text": "one two three"}\n' * 4)
        where = ("--peer", self.server.address, "--data", "data.jsonl", "--out", "out", "--steps", "4")
        return self.run("tune", "tiny-llama", *where, "--batch-size", "1", "--sample-tokens", "2", *options)

    @property
    def saved(self) -> Any:
        return json.loads(Path("chat.json").read_text())

    def at_the_first_token(self, accident: Callable[[], None]) -> None:
        self._at(Output, "write", 1, accident)

    def at_the_second_step(self, accident: Callable[[], None]) -> None:
        self._at(tune._TuneReport, "_step", 2, accident)

    def when_ready(self, accident: Callable[[], None]) -> None:
        """Of a command that runs until it is stopped: as soon as it says that it is ready, in JSON or not."""
        self._at(Output, "emit", 1, accident)

    def at_the_first_probe(self, accident: Callable[[], None]) -> None:
        self._at(Validator, "_probe", 1, accident)

    def once_told_of_a_loss(self, accident: Callable[[], None]) -> None:
        """As soon as a person at a chat was told of a lost server."""
        self._at(Chatter, "_tell_interruption", 1, accident, after=True)

    def at_the_model(self, accident: Callable[[], None]) -> None:
        """Before the client's part of it is loaded."""
        self._at(client_part, "load_client", 1, accident)

    def _at(self, owner: Any, name: str, turn: int, accident: Callable[[], None], *, after: bool = False) -> None:
        whole, turns = getattr(owner, name), 0

        def happens(*arguments: Any, **named: Any) -> Any:
            nonlocal turns
            turns += 1
            if turns == turn and not after:
                accident()
            result = whole(*arguments, **named)
            if turns == turn and after:
                accident()
            return result

        self.monkeypatch.setattr(owner, name, happens)

    def node(self, command: str) -> tuple[int, list[str], list[str]]:
        """Runs one of `NODES`; its key is free again and no half-written file is left."""
        code, out, err = self.run(*NODES[command].format(peer=self.server.address).split())
        data = self.folder / "home" / "data" / "petalnode"
        assert not [file for file in self.folder.rglob("*") if file.name.startswith((".petalnode-", "tmp"))]
        if command != "api":
            with held_identity(None, command, data):
                pass
        return code, out, err


@pytest.fixture(scope="module")
def server(node_starter: Nodes, models: Path) -> Node:
    return node_starter.server(models / "tiny-llama", "0:6", *ROOM)


@pytest.fixture
def person(
    server: Node, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Person]:
    for name, value in environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-llama").symlink_to(models / "tiny-llama")
    before = {number: signal.signal(number, process.interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield Person(tmp_path, server, monkeypatch, capsys)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDED, ids=lambda number: number.name)
def test_a_signal_in_an_answer(number: signal.Signals, person: Person) -> None:
    person.at_the_first_token(lambda: signal.raise_signal(number))
    code, out, err = person.chat()
    assert (code, err[-1]) == (ENDED[number][0], f"petalnode: {ENDED[number][1]}")
    assert person.saved["turns"][0] == ["user", "one two"] and person.saved["turns"][1][1]
    assert out[-1] == "(stopped)"


def test_nobody_reads_an_answer_any_more(person: Person) -> None:
    def close() -> None:
        raise process.OutputClosed

    person.at_the_first_token(close)
    code, _, _ = person.chat()
    assert code == 0
    assert person.saved["unfinished"] and person.saved["turns"][1][1]


@pytest.mark.parametrize("number", ENDED, ids=lambda number: number.name)
def test_a_signal_in_a_training(number: signal.Signals, person: Person) -> None:
    person.at_the_second_step(lambda: signal.raise_signal(number))
    code, out, err = person.tune()
    assert (code, err[-1]) == (ENDED[number][0], f"petalnode: {ENDED[number][1]}")
    assert any("Interrupted after step 2. Go on with" in line for line in out) and "--resume" in out[-1]
    code, out, _ = person.tune("--resume")
    assert code == 0 and any("going on at step 3" in line for line in out) and out[-1] == "saved in out"


@pytest.mark.parametrize("error", [process.OutputClosed(), MemoryError()], ids=["closed pipe", "no memory"])
def test_training_that_cannot_go_on_leaves_checkpoint(error: BaseException, person: Person) -> None:
    def fail() -> None:
        raise error

    person.at_the_second_step(fail)
    code, _, err = person.tune()
    assert code == (4 if isinstance(error, MemoryError) else 0)
    assert Path("out/checkpoint.safetensors").exists()
    assert code == 0 or "not enough memory" in err[-1]


def test_no_memory_for_the_model(person: Person) -> None:
    def fail() -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: 1 bytes")

    person.at_the_model(fail)
    code, _, err = person.chat()
    assert code == 4 and "not enough memory" in err[-1]


def _kill(node: Node) -> None:
    node.signal(signal.SIGKILL)
    node.process.wait()


def losing(what: str, person: Person, node_starter: Nodes, models: Path) -> tuple[Node, Callable[[], None]]:
    """The person's server, which is started, and what makes it "killed", "frozen" or "replaced by another model"."""
    here = ("--identity", str(person.folder / "server.key"), "--listen", f"/ip4/127.0.0.1/tcp/{free_port()}")
    person.server = victim = node_starter.server(models / "tiny-llama", "0:6", *ROOM, *here)
    assert victim.ready

    def lose() -> None:
        if what == "frozen":
            victim.signal(signal.SIGSTOP)
            return
        _kill(victim)
        if what != "killed":
            assert node_starter.server(models / "other-llama", "0:6", *here, *ROOM).peer_id == victim.peer_id

    return victim, lose


@pytest.mark.parametrize("what", ["killed", "frozen", "replaced by another model"])
def test_the_only_server_is_lost_in_an_answer(what: str, person: Person, node_starter: Nodes, models: Path) -> None:
    """The person is told which it was and what would help, and gives up then."""
    victim, lose = losing(what, person, node_starter, models)
    # Once: a second one would not wait for what came of the answer.
    person.once_told_of_a_loss(lambda: signal.raise_signal(signal.SIGINT))
    person.at_the_first_token(lose)
    code, out, err = person.chat("--json")
    events = [json.loads(line) for line in out]
    assert (code, err[-1]) == (130, "petalnode: interrupted")
    assert person.saved["turns"][0] == ["user", "one two"] and person.saved["turns"][1][1] == events[-1]["text"]
    if events[0].get("event") == "server-lost":
        assert (events[0]["peer_id"], events[0]["blocks"]) == (victim.peer_id, [0, 6])
        assert events[0]["waits_seconds"] == 30 and "start this server again" in events[0]["advice"]
    else:
        assert what == "frozen" and any(f"{victim.peer_id[-8:]} (blocks 0:6) is silent" in line for line in err)
    _kill(victim)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_wrong_by_an_hour(hours: int, person: Person) -> None:
    person.monkeypatch.setattr(
        node_report, "CLOCKS", replace(node_report.CLOCKS, settle_time=120.0)
    )  # however slow this machine is
    right = time.time
    person.monkeypatch.setattr(time, "time", lambda: right() + hours * 3600)
    code, _, err = person.run("status", "--peer", person.server.address)
    assert code == 3
    assert f"this machine's clock is 3600 s {'ahead of' if hours > 0 else 'behind'} that of" in err[-1]


async def test_signal_does_not_wait_for_hashes_of_model(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over = threading.Event(), threading.Event()

    def hash_for_minutes(*_: object) -> None:
        begun.set()
        over.wait()

    monkeypatch.setattr(swarm_model, "compute_manifest", hash_for_minutes)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm_model.identify_model, None, resolve(str(models / "tiny-llama")))
            await trio.to_thread.run_sync(begun.wait)
            nursery.cancel_scope.cancel()
    finally:
        over.set()


def test_command_runs_in_loop_of_its_own() -> None:
    """Nothing of those above is left: a signal ends this process as before."""
    assert signal.getsignal(signal.SIGTERM) is not process.interrupt
    trio.run(trio.sleep, 0)


@pytest.mark.parametrize("number", ENDED, ids=lambda number: number.name)
@pytest.mark.parametrize("command", NODES)
def test_a_signal_for_a_node_at_work(command: str, number: signal.Signals, person: Person) -> None:
    """SIGTERM and SIGHUP are how a service is told to stop: a node that others use leaves the swarm, and is done."""
    person.when_ready(lambda: signal.raise_signal(number))
    code, _, err = person.node(command)
    expected = ENDED[number][0] if number == signal.SIGINT or command == "api" else 0
    ended = _end_of(command) if command == "serve" else (expected, f"petalnode: {ENDED[number][1]}")
    assert (code, err[-1]) == ended


@pytest.mark.parametrize("command", NODES)
def test_nobody_reads_what_a_node_says(command: str, person: Person) -> None:
    def close() -> None:
        raise process.OutputClosed

    person.when_ready(close)
    assert person.node(command)[0] == 0


@pytest.mark.parametrize("command", NODES)
def test_the_disk_is_full_when_a_node_ends(command: str, person: Person) -> None:
    """What would be remembered is not; the command ends as it should."""
    with ExitStack() as full:

        def fill_and_end() -> None:
            full.enter_context(full_disk())
            signal.raise_signal(signal.SIGINT)

        person.when_ready(fill_and_end)
        code, out, err = person.run(*NODES[command].format(peer=person.server.address).split())
    assert (code, err[-1]) == _end_of(command), out


@pytest.mark.parametrize(
    ("command", "what"), [("serve", "killed"), ("api", "killed"), *((command, "frozen") for command in NODES)]
)
def test_node_ends_though_only_peer_is_lost(
    command: str, what: str, person: Person, node_starter: Nodes, models: Path
) -> None:
    person.server = node_starter.server(models / "tiny-llama", "0:6", *ROOM)

    def lose_and_end() -> None:
        if what == "killed":
            _kill(person.server)
        else:
            person.server.signal(signal.SIGSTOP)
        signal.raise_signal(signal.SIGINT)

    person.when_ready(lose_and_end)
    code, _, err = person.node(command)
    assert (code, err[-1]) == _end_of(command)
    _kill(person.server)


def test_a_full_disk_in_a_validation(person: Person) -> None:
    """A verdict that cannot be kept is no verdict."""
    with ExitStack() as full:
        person.at_the_first_probe(lambda: full.enter_context(full_disk()))
        code, _, err = person.run("validate", "tiny-llama", "--peer", person.server.address, "--once")
    assert code == 4 and "the validator's history" in err[-1] and "free the disk" in err[-1]


@pytest.mark.parametrize("what", ["killed", "frozen", "replaced by another model"])
def test_the_server_is_lost_in_a_validation(what: str, person: Person, node_starter: Nodes, models: Path) -> None:
    """No fault of the server: whatever is wrong, others may have made it so."""
    victim, lose = losing(what, person, node_starter, models)

    person.monkeypatch.setattr(prober, "PROBE_TIMEOUT", 2.0)
    person.at_the_first_probe(lose)
    code, out, err = person.run("validate", "tiny-llama", "--peer", victim.address, "--once", "--json")
    if what == "replaced by another model":
        (verdict,) = map(json.loads, out)
        assert (code, verdict["verdict"], verdict["peer_id"]) == (0, "inconclusive", victim.peer_id)
    else:  # it was the only node that the swarm was joined by
        assert (code, out) == (3, []) and victim.peer_id in err[-1] and "Check the addresses" in err[-1]
    _kill(victim)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signal_while_the_apis_server_is_lost(
    number: signal.Signals, person: Person, node_starter: Nodes, models: Path
) -> None:
    """Nobody waits for the server. The client that reads the answer sees its connection end."""
    person.server = victim = node_starter.server(models / "tiny-llama", "0:6", *ROOM)
    read, port = list[bytes](), free_port()

    def ask() -> None:
        question = {"model": "tiny-llama", "prompt": "one two", "max_tokens": 3000, "stream": True}
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(question).encode())
        asked.add_header("Content-Type", "application/json")
        with suppress(OSError, http.client.HTTPException), urllib.request.urlopen(asked) as answer:
            read.append(answer.readline())
            _kill(victim)
            os.kill(os.getpid(), number)
            read.extend(answer)

    client = threading.Thread(target=ask, daemon=True)
    person.when_ready(client.start)
    code, _, err = person.run("api", "tiny-llama", "--peer", victim.address, "--http-port", str(port))
    assert (code, err[-1]) == (ENDED[number][0], f"petalnode: {ENDED[number][1]}")
    client.join()
    assert read[0].startswith(b"data: ") and not read[-1].startswith(b"data: [DONE]")
