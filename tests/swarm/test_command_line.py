"""The commands as a person and a script meet them: exit codes, one clear sentence, the contract's JSON."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from petalnode import __version__
from petalnode.node.cli import control
from petalnode.node.cli.output import Output
from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import LOOPBACK, Node, Nodes, Outcome, environment, petalnode, until

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWBhrhHZJGkd5mZzQm7dUeUqBvF9ypJTJQTtjrcDMWFXQV"
TYPO = "/ip4/127.0.0.1/tpc/31330/p2p/12D3KooWBhrhHZJGkd5mZzQm7dUeUqBvF9ypJTJQTtjrcDMWFXQV"
SERVE = ("--new-swarm", "--listen", LOOPBACK)
CODES = {"done": 0, "bad input": 2, "swarm cannot": 3, "machine cannot": 4}


@dataclass(frozen=True)
class Case:
    """A command, how it ends, and what its one sentence says (a regular expression)."""

    arguments: str
    ends: str
    says: str = ""
    given: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


MISTAKES = {
    # {name} is a folder or address of the fixture `places`.
    "no such model": Case("serve {nothing} {new}", "bad input", "{nothing}"),
    "a folder that is no model": Case("serve {empty} {new}", "bad input", "{empty}"),
    "a truncated checkpoint": Case("serve {truncated} --blocks 0:2 {new}", "bad input", "model.safetensors"),
    "a span backwards": Case("serve {llama} --blocks 5:3 {new}", "bad input", "5:3"),
    "a span too far": Case("serve {llama} --blocks 0:999 {new}", "bad input", "6 blocks"),
    "a span of no blocks": Case("serve {llama} --blocks 2:2 {new}", "bad input", "2:2"),
    "no span at all": Case("serve {llama} --blocks x {new}", "bad input", "A:B"),
    "too many blocks": Case("serve {llama} --num-blocks 99 {new}", "bad input", "6 blocks"),
    "no blocks": Case("serve {llama} --num-blocks 0 {new}", "bad input", "num-blocks"),
    "both kinds of blocks": Case("serve {llama} --num-blocks 2 --blocks 0:2 {new}", "bad input", "give one"),
    "a throughput that is none": Case("serve {llama} --throughput fast {new}", "bad input", "fast"),
    "a cache of fewer bits for bfloat16": Case(
        "serve {llama} --cache-dtype int8 --dtype bfloat16 {new}", "bad input", "computes in float32: leave it out"
    ),
    "a quantisation that is none": Case("serve {llama} --quant int4 {new}", "bad input", "none, int8, nf4"),
    "no cache": Case("serve {llama} --cache-tokens 0 {new}", "bad input", "cache-tokens"),
    "a peer with a typo": Case("serve {llama} --peer {typo} --listen {loopback}", "bad input", "tpc"),
    "a peer without an id": Case("status --peer /ip4/127.0.0.1/tcp/31330", "bad input", "p2p"),
    "a peer that is no address": Case("chat --peer localhost:31330", "bad input", "localhost:31330"),
    "a typo in the environment": Case("status", "bad input", "tpc", env={"PETALNODE_PEERS": TYPO}),
    "a peer that nobody answers at": Case(
        "serve {llama} --peer {nobody} --listen {loopback}", "swarm cannot", "12D3KooWBhr"
    ),
    "chat with nobody": Case("chat --peer {nobody} --prompt hi", "swarm cannot", "12D3KooWBhr"),
    "a new swarm and a peer": Case("serve {llama} --peer {nobody} --new-swarm", "bad input", "--new-swarm"),
    "an address that is none": Case("bootstrap --new-swarm --listen 127.0.0.1:1", "bad input", "127.0.0.1:1"),
    "a port in use": Case("serve {llama} --new-swarm --listen {taken}", "machine cannot", "{taken_port}"),
    "a port in use, bootstrap": Case("bootstrap --new-swarm --listen {taken}", "machine cannot", "{taken_port}"),
    "an identity in use": Case("serve {llama} {new} --identity {held}", "machine cannot", "{held}"),
    "an identity that is none": Case("serve {llama} {new} --identity {llama}/config.json", "bad input", "config.json"),
    "a log level that is none": Case("serve {llama} {new} --log-level nonsense", "bad input", "nonsense"),
    "status of no swarm": Case("status", "bad input", "--peer"),
    "chat with no swarm": Case("chat --prompt hi", "bad input", "--peer"),
    "chat where nobody is known": Case(
        "chat --prompt hi",
        "swarm cannot",
        "no swarm was found.*--peer",
        env={"PETALNODE_REMEMBER": "1", "XDG_DATA_HOME": "{elsewhere}"},  # where no server of this user runs
    ),
    "a swarm key that is none": Case(
        "status --peer {nobody} --swarm-key {llama}/config.json", "bad input", "config.json is no swarm key"
    ),
    "a swarm key over a file": Case("swarm-key {llama}/config.json", "bad input", "config.json is there already"),
    "a relay that is none": Case("bootstrap {new} --relay somewhere", "bad input", "somewhere"),
    "status of a swarm without models": Case("status --peer {meeting}", "swarm cannot", "any model"),
    "status of a model that is not there": Case("status gpt-9 --peer {shared}", "swarm cannot", "gpt-9"),
    "chat in a swarm without models": Case("chat --prompt hi --peer {meeting}", "swarm cannot", "serves a model"),
    "chat with another model": Case(
        "chat {other} --prompt hi --peer {lone}", "swarm cannot", "other-llama.*it serves tiny-llama"
    ),
    "chat in a swarm of several models": Case(
        "chat --prompt hi --peer {shared}", "bad input", "tiny-gemma3, tiny-gpt2, tiny-llama"
    ),
    "chat where blocks are missing": Case("chat {llama} --prompt hi --peer {half}", "swarm cannot", "blocks 3:6"),
    "an empty pipe": Case("chat {llama} --peer {shared}", "bad input", "pipe"),
    "a prompt that is too long": Case("chat {llama} --peer {shared}", "bad input", "4096", given="long " * 2000),
    "a temperature that is none": Case("chat --prompt hi --temperature -1 --peer {shared}", "bad input", "temperature"),
    "a top-p that is none": Case("chat --prompt hi --top-p 7 --peer {shared}", "bad input", "top-p"),
}  # fmt: skip

ANSWERS = {
    "from a pipe": Case("chat {llama} --peer {shared} --max-new-tokens 6", "done", given="hi\n"),
    "without a model": Case("chat --prompt hi --peer {lone} --max-new-tokens 6 --show-route", "done"),
    "as json": Case("chat {llama} --prompt hi --peer {shared} --json --max-new-tokens 6", "done"),
    "status": Case("status --peer {shared}", "done"),
    "status as json": Case("status --peer {shared} --json", "done"),
    "status of one model": Case("status tiny-gpt2 --peer {shared} --json", "done"),
    "version": Case("--version", "done"),
    "help": Case("--help", "done"),
}  # fmt: skip


@pytest.fixture(scope="module")
def meeting(node_starter: Nodes) -> Node:
    """A bootstrap node, in a swarm of its own."""
    return node_starter.bootstrap()


@pytest.fixture(scope="module")
def half(node_starter: Nodes, models: Path, meeting: Node) -> Node:
    """The first half of tiny-llama, in the swarm of `meeting`."""
    node = node_starter.server(models / "tiny-llama", "0:3", peer=meeting.address)
    node.ready  # noqa: B018  (waits)
    return node


@pytest.fixture(scope="module")
def places(
    shared_swarm: SharedSwarm,
    lone_server: Node,
    half: Node,
    meeting: Node,
    node_starter: Nodes,
    models: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, str]]:
    root = tmp_path_factory.mktemp("places")
    (root / "empty").mkdir()
    truncated = root / "truncated"
    shutil.copytree(models / "tiny-llama", truncated)
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        held = lone_server.process.args
        assert isinstance(held, list)
        yield {
            "nothing": str(root / "nothing"),
            "empty": str(root / "empty"),
            "truncated": str(truncated),
            "llama": str(shared_swarm.folder),
            "other": str(models / "other-llama"),
            "new": " ".join(SERVE),
            "loopback": LOOPBACK,
            "typo": TYPO,
            "nobody": NOBODY,
            "taken": f"/ip4/127.0.0.1/tcp/{port}",
            "taken_port": port,
            "held": held[held.index("--identity") + 1],
            "shared": shared_swarm.peer,
            "meeting": node_starter.meeting_point().event("ready")["addrs"][0],
            "lone": lone_server.address,
            "half": meeting.address,
            "elsewhere": str(root / "elsewhere"),
        }


@pytest.fixture(scope="module")
def outcomes(places: dict[str, str], models: Path, home: Path) -> Iterator[Callable[[str], Outcome]]:
    """All commands of this file, a few at a time: most of what each does is import."""

    def run(case: Case) -> Outcome:
        arguments = case.arguments.format(**places).split()
        # A model's name is looked up as a folder where the command runs.
        env = environment(home, **{name: value.format(**places) for name, value in case.env.items()})
        return petalnode(*arguments, env=env, cwd=models, given=case.given)

    with ThreadPoolExecutor(max_workers=3) as pool:
        waiting: dict[str, Future[Outcome]] = {
            name: pool.submit(run, case) for name, case in (MISTAKES | ANSWERS).items()
        }
        yield lambda name: waiting[name].result(170)
        for future in waiting.values():
            future.cancel()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_line(name: str, outcomes: Callable[[str], Outcome], places: dict[str, str]) -> None:
    case, outcome = MISTAKES[name], outcomes(name)
    assert outcome.code == CODES[case.ends], outcome
    assert "Traceback" not in outcome.err + outcome.out, outcome
    said = outcome.err
    if "Usage:" not in said:  # typer explains wrong options in a box of its own
        lines = [line for line in said.splitlines() if line.startswith("petalnode:")]
        assert len(lines) == 1, outcome
        said = lines[0]
    expected = case.says
    for place, path in places.items():
        expected = expected.replace("{" + place + "}", re.escape(path))
    assert re.search(expected, said), outcome


def test_chat_answers_what_comes_from_a_pipe(outcomes: Callable[[str], Outcome]) -> None:
    outcome = outcomes("from a pipe")
    assert outcome.code == 0, outcome
    assert outcome.out.endswith("\n") and 0 < len(outcome.out.strip("\n")) <= 6


def test_chat_without_model_takes_one_that_is_served(outcomes: Callable[[str], Outcome], lone_server: Node) -> None:
    outcome = outcomes("without a model")
    assert outcome.code == 0, outcome
    assert lone_server.peer_id[-8:] in outcome.out and "tokens/s" in outcome.out


def test_chat_as_json_is_one_object(outcomes: Callable[[str], Outcome], shared_swarm: SharedSwarm) -> None:
    outcome = outcomes("as json")
    assert outcome.code == 0, outcome
    (answer,) = outcome.objects
    assert {"text", "tokens", "seconds", "route", "recoveries"} <= answer.keys()
    assert answer["tokens"] == 6 and answer["text"]
    assert answer["seconds"] > 0 and answer["recoveries"] == 0
    assert answer["route"] == [
        {"peer_id": node.peer_id, "blocks": blocks}
        for node, blocks in zip(shared_swarm.llama, ([0, 2], [2, 4], [4, 6]), strict=True)
    ]


def test_status_as_json_has_a_line_per_model(outcomes: Callable[[str], Outcome], shared_swarm: SharedSwarm) -> None:
    outcome = outcomes("status as json")
    assert outcome.code == 0, outcome
    models = {line["model"]: line for line in outcome.objects}
    assert set(models) == {"tiny-llama", "tiny-gpt2", "tiny-gemma3"}
    llama = models["tiny-llama"]
    assert llama["num_blocks"] == 6 and llama["coverage"] == [1] * 6
    assert [(server["peer_id"], server["blocks"]) for server in llama["servers"]] == [
        (node.peer_id, node.ready["blocks"]) for node in shared_swarm.llama
    ]
    for server in llama["servers"]:
        assert server["state"] == "online"
        assert server["throughput"] > 0
        assert 0 <= server["cache_tokens_free"] <= 100000
    (only,) = outcomes("status of one model").objects
    assert only["model"] == "tiny-gpt2"


def test_status_draws_the_swarm(outcomes: Callable[[str], Outcome], shared_swarm: SharedSwarm) -> None:
    outcome = outcomes("status")
    assert outcome.code == 0, outcome
    for node in (*shared_swarm.llama, *shared_swarm.others):
        assert node.peer_id[-8:] in outcome.out
    assert "█" in outcome.out and "tiny-gemma3" in outcome.out


def test_version_and_help(outcomes: Callable[[str], Outcome]) -> None:
    assert outcomes("version").out.strip() == __version__
    for command in ("demo", "serve", "chat", "status", "bootstrap"):
        assert command in outcomes("help").out


def test_the_ready_event_of_serve(shared_swarm: SharedSwarm) -> None:
    ready = shared_swarm.llama[1].ready
    assert ready["event"] == "ready" and ready["model"] == "tiny-llama" and ready["blocks"] == [2, 4]
    for address in ready["addrs"]:
        assert address.startswith("/ip4/127.0.0.1/tcp/") and address.endswith(f"/p2p/{ready['peer_id']}")


def test_a_second_server_fills_the_gap(
    half: Node, meeting: Node, node_starter: Nodes, models: Path, outcomes: Callable[[str], Outcome]
) -> None:
    outcomes("chat where blocks are missing")  # must have seen the gap first
    second = node_starter.server(models / "tiny-llama", None, "--num-blocks", "3", peer=meeting.address)
    assert second.ready["blocks"] == [3, 6]
    outcome = petalnode(
        *("chat", "tiny-llama", "--prompt", "hi", "--json", "--max-new-tokens", "4", "--peer", meeting.address),
        env=node_starter.env,
        cwd=models,
    )
    assert outcome.code == 0, outcome
    assert [hop["blocks"] for hop in outcome.objects[0]["route"]] == [[0, 3], [3, 6]]

    # One is told by a service manager to stop, the other by a person.
    half.signal(signal.SIGTERM)
    assert half.wait() == 0, half.errors
    second.signal(signal.SIGINT)
    assert second.wait() == 0 and "done: nobody was served" in second.errors, second.errors
    for node in (half, second):
        assert "Traceback" not in node.errors


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_bootstrap_until_it_is_told_to_stop(number: signal.Signals, code: int, node_starter: Nodes) -> None:
    node = node_starter.bootstrap("--metrics-port", "0")
    url = node.event("metrics")["url"]
    assert node.ready["addrs"] and node.address.endswith(node.peer_id)
    with closing(HTTPConnection(urlsplit(url).netloc)) as connection:
        connection.request("GET", "/metrics")
        assert b'petalnode_build_info{role="bootstrap"' in connection.getresponse().read()
    node.signal(number)
    assert node.wait() == code, node.errors
    assert "Traceback" not in node.errors


def test_a_server_says_goodbye(
    lone_server: Node,
    node_starter: Nodes,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server that is stopped is out of the swarm at once, not when its announcement expires."""
    leaving = node_starter.server(models / "tiny-llama", "0:2", "--name", "leaving", peer=lone_server.address)

    def names() -> list[str]:
        seen = petalnode("status", "--json", "--peer", lone_server.address, env=node_starter.env)
        return [server["name"] for line in map(json.loads, seen.out.splitlines()) for server in line["servers"]]

    assert leaving.ready
    until(lambda: "leaving" in names(), "the new server is seen")
    # Before it leaves for good, its owner pauses it by a signal, and lets it go on as `petalnode resume` does.
    leaving.signal(signal.SIGUSR1)
    assert leaving.event("paused")["reason"] == "its owner has paused it"
    folder = Path(node_starter.env["XDG_DATA_HOME"]) / "petalnode" / "control"
    monkeypatch.setattr(control, "control_folder", lambda: folder)
    control.send_wish(str(leaving.pid), "resume", Output(True))
    assert json.loads(capsys.readouterr().out)["state"] == "serving"
    assert leaving.event("resumed")
    assert leaving.stop() == 0, leaving.errors
    until(lambda: "leaving" not in names(), "the server that left is gone", timeout=15)


def test_a_killed_server_is_not_answering(node_starter: Nodes, models: Path) -> None:
    meeting = node_starter.bootstrap()
    server = node_starter.server(models / "tiny-llama", "0:2", "--name", "killed", peer=meeting.address)
    assert server.ready

    def answers() -> list[tuple[bool | None, list[int]]]:
        seen = petalnode("status", "--peer", meeting.address, "--json", env=node_starter.env)
        models = map(json.loads, seen.out.splitlines())
        return [(one["answers"], model["coverage"]) for model in models for one in model["servers"]]

    until(lambda: answers() == [(True, [1, 1, 0, 0, 0, 0])], "the server is seen")
    server.kill()
    assert answers() == [(False, [0] * 6)]
    assert "not answering" in petalnode("status", "--peer", meeting.address, env=node_starter.env).out


def test_command_without_a_swarm_finds_a_neighbours(node_starter: Nodes, models: Path, tmp_path: Path) -> None:
    env = environment(tmp_path, PETALNODE_REMEMBER="1")
    server = Node("serve", str(models / "tiny-llama"), "--new-swarm", "--blocks", "0:2", "--json", env=env)
    node_starter.running.append(server)
    assert server.ready
    found = petalnode("status", "--json", env=env)
    assert found.code == 0, found
    assert [one["peer_id"] for model in map(json.loads, found.out.splitlines()) for one in model["servers"]] == [
        server.peer_id
    ]
    assert petalnode("status", "--json", env=environment(tmp_path / "other", PETALNODE_REMEMBER="1")).code == 3
