"""Sessions across NATs: relayed, moved to a direct connection, and taken up again when the way there is lost.

Every answer is what plain transformers says, token for token. The times are printed: pytest -s.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest

from tests.nat.clients import Client
from tests.nat.expected import Expected
from tests.nat.lab import Host, Kind, Nat, open_lab, why_not
from tests.nat.nodes import LISTEN, LabNodes, lab_nodes
from tests.swarm.processes import Node
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_models import save_tiny

RELAY = ("--new-swarm", "--listen", LISTEN)
ENDLESS = 3500
"""Tokens that are generated at most, until what a test waits for has happened."""


@dataclass(frozen=True)
class World:
    """A relay on the internet; a whole model behind a NAT that can be punched, and one in halves behind two that
    cannot. The laptop's NAT can be punched, the phone's cannot."""

    nodes: LabNodes
    relay: Node
    relay_host: Host
    home: Nat
    cafe: Nat
    laptop: Client
    phone: Client
    whole: str
    halves: list[str]
    go: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tokenizer(save_tiny("llama", made, max_position_embeddings=4096, eos_token_id=None))
    return made


@pytest.fixture(scope="module")
def world(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if reason := why_not():
        pytest.skip(reason)
    with open_lab() as lab, lab_nodes(tmp_path_factory.mktemp("machines")) as nodes:
        relay_host, home, cafe = lab.host("relay"), lab.nat("home"), lab.nat("cafe", Kind.SYMMETRIC)
        relay = nodes.command(relay_host, "bootstrap", *RELAY)
        peer = relay.address
        go = nodes.home(relay_host) / "go"
        serve = ("serve", str(folder), "--listen", LISTEN, "--peer", peer, "--cache-tokens", "20000")
        office = lab.nat("office").host("office-server")
        held = [sys.executable, "-m", "tests.nat.held_server", str(go), *serve, "--blocks", "0:6", "--json"]
        whole = nodes.program(office, held)
        halves = [
            nodes.command(lab.nat(name, Kind.SYMMETRIC).host(f"{name}-server"), *serve, "--blocks", blocks)
            for name, blocks in (("flat", "0:3"), ("attic", "3:6"))
        ]
        laptop, phone = (
            Client(nodes, nat.host(name), folder, peer) for nat, name in ((home, "laptop"), (cafe, "phone"))
        )
        whole_id, half_ids = whole.event("ready")["peer_id"], [half.peer_id for half in halves]
        yield World(nodes, relay, relay_host, home, cafe, laptop, phone, whole_id, half_ids, go)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    return Expected(folder)


def test_an_answer_through_two_nats_and_a_relay(world: World, expected: Expected) -> None:
    """Where no punching works the session stays on the relay."""
    client = world.phone
    client.order(allowed=[world.whole])
    first = client.first()
    done = client.done()
    assert done["ids"] == expected(done["ids"])
    assert done["direct"] == [False] and done["recoveries"] == 0
    print(f"\nfirst token {first:.2f} s after the model was asked for, by a client that knew one address")


def test_a_session_moves_when_the_nats_are_punched(world: World, expected: Expected) -> None:
    client = world.laptop
    client.order(ENDLESS, allowed=[world.whole], until={"moved": 1}, more=20)
    relayed = [client.token()["seconds"] for _ in range(20)][5:]
    world.go.touch()
    begun = monotonic()
    tokens = [client.token()]
    while not all(tokens[-1]["direct"]):
        tokens.append(client.token())
    print(f"\nmoved {monotonic() - begun:.2f} s after the punching began, in the course of {len(tokens)} tokens")
    done = client.done()
    assert done["ids"] == expected(done["ids"])
    assert (done["moved"], done["rejoined"], done["recoveries"]) == (1, 0, 0)
    assert done["direct"] == [True]
    longest = max(token["seconds"] for token in tokens)
    print(f"a relayed token {median(relayed):.1f} ms, the longest while it moved {1000 * longest:.1f} ms")


def test_servers_behind_two_nats_push_to_each_other(world: World, expected: Expected) -> None:
    client = world.phone
    client.order(40, allowed=world.halves)
    done = client.done()
    assert done["ids"] == expected(done["ids"])
    assert done["route"] == world.halves and done["recoveries"] == 0
    assert done["direct"] == [False, False]
    assert done["pushed"] >= 30  # the first ones are relayed by the client, while a stream is opened


@pytest.mark.parametrize("what", ["the client's address changes", "a NAT forgets"])
def test_way_that_is_lost_silently_is_found_again(what: str, world: World, expected: Expected) -> None:
    client, nat = (world.laptop, world.home) if "address" in what else (world.phone, world.cafe)
    client.order(ENDLESS, allowed=[world.whole], until={"rejoined": 1}, more=20)
    client.token(20)
    if "address" in what:
        nat.change_address()
    else:
        nat.forget_mappings()
    longest = 0.0
    while longest < 0.5:
        longest = client.token()["seconds"]
    done = client.done()
    assert done["ids"] == expected(done["ids"])
    assert done["rejoined"] >= 1 and done["recoveries"] == 0
    print(f"\n{what}: no token for {longest:.1f} s, most of which it takes to notice")


def test_the_relay_dies_and_comes_back(world: World, expected: Expected) -> None:
    """Last of those that share a world: it takes the relay of all with it."""
    client = world.phone
    client.order(ENDLESS, allowed=world.halves, until={"changed": 1}, more=20)
    client.token(20)
    world.relay.signal(signal.SIGKILL)
    world.relay.wait()
    back = world.nodes.command(world.relay_host, "bootstrap", *RELAY)
    assert back.peer_id == world.relay.peer_id
    returned = monotonic()
    done = client.done()
    print(f"\nthe whole answer {monotonic() - returned:.1f} s after the relay's return")
    assert done["ids"] == expected(done["ids"])
    assert done["rejoined"] + done["recoveries"] >= 1


def test_lines_of_100_ms(folder: Path, expected: Expected, delays: None, tmp_path: Path) -> None:
    """Round trips of 100 ms from each side to the relay: 200 ms from client to server, and nothing misfires."""
    with open_lab() as lab, lab_nodes(tmp_path) as nodes:
        relay = nodes.command(lab.host("relay"), "bootstrap", *RELAY)
        office, home = (lab.nat(name, Kind.SYMMETRIC, delay=0.05) for name in ("office", "home"))
        serve = ("serve", str(folder), "--listen", LISTEN, "--peer", relay.address, "--blocks", "0:6")
        server = nodes.command(office.host("server"), *serve)
        client = Client(nodes, home.host("client"), folder, relay.address)
        server.ready  # noqa: B018  (waits)
        client.order(30, allowed=[server.peer_id])
        first = client.first()
        steps = [client.token()["seconds"] for _ in range(29)][5:]
        done = client.done()
        assert done["ids"] == expected(done["ids"])
        assert (done["recoveries"], done["rejoined"], done["direct"]) == (0, 0, [False])
        print(f"\nfirst token after {first:.2f} s, a step {median(steps):.0f} ms of which 200 are the lines'")


def median(seconds: Sequence[float]) -> float:
    """In milliseconds."""
    return 1000 * sorted(seconds)[len(seconds) // 2]
