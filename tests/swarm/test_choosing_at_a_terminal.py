"""A person at a terminal is asked which model, and whether to follow a link; a pipe gets the error."""

from __future__ import annotations

import re
from pathlib import Path

from tests.swarm import announcers
from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import Nodes, environment, petalnode
from tests.swarm.terminals import terminal


def test_one_of_several_models_is_chosen_by_number(shared_swarm: SharedSwarm, node_starter: Nodes) -> None:
    arguments = ("invite", "--peer", shared_swarm.peer)
    with terminal(*arguments, env=node_starter.env, cwd=shared_swarm.models) as screen:
        listed = screen.until("which one? [1-3] ")
        lines = [line for line in listed.splitlines() if "tiny-" in line]
        assert [line.split()[0] for line in lines] == ["1", "2", "3"] and all("served by" in line for line in lines)
        llama = next(line for line in lines if "tiny-llama" in line)
        assert llama.count("…") == 3, llama  # its three servers
        screen.type(f"{llama.split()[0]}\n")
        screen.until("for tiny-llama@")
        assert screen.exit_code() == 0
    with terminal(*arguments, env=node_starter.env, cwd=shared_swarm.models) as screen:
        screen.until("which one? [1-3] ")
        screen.type("9\n")
        assert screen.exit_code() == 2
    piped = petalnode(*arguments, env=node_starter.env)
    assert piped.code == 2 and "several models: name one of" in piped.err, piped


def test_plan_is_made_for_model_that_is_chosen(shared_swarm: SharedSwarm, node_starter: Nodes) -> None:
    arguments = ("plan", "--peer", shared_swarm.peer)
    with terminal(*arguments, env=node_starter.env, cwd=shared_swarm.models) as screen:
        lines = [line for line in screen.until("which one? [1-3] ").splitlines() if "tiny-gpt2" in line]
        screen.type(f"{lines[0].split()[0]}\n")
        assert screen.exit_code() == 0 and "tiny-gpt2" in screen.shown.partition("which one?")[2]
    piped = petalnode(*arguments, env=node_starter.env)
    assert piped.code == 2 and "several models: name one of" in piped.err, piped


def test_one_of_several_versions_is_chosen_by_number(tmp_path: Path) -> None:
    """Of two swarms that know nothing of each other."""
    with announcers.Nodes() as nodes:
        first, second = (
            nodes.start(blocks=[0, 4], num_blocks=4, model_name="twice", model_version=digits * 32)
            for digits in ("11", "22")
        )
        peers = ("--peer", first.ready().addr, "--peer", second.ready().addr)
        env = environment(tmp_path)
        with terminal("chat", "twice", *peers, env=env, cwd=tmp_path) as screen:
            lines = screen.until("which one? [1-2] ").splitlines()
            shown = {line.split()[1].rstrip(","): line for line in lines if "served by" in line}
            assert list(shown) == ["twice@1111111111111111", "twice@2222222222222222"]
            assert second.peer_id[-8:] in shown["twice@2222222222222222"]
            screen.type("2\n")  # whose server hands nothing on
            assert screen.exit_code() == 3 and "several versions" not in screen.shown.partition("which one?")[2]
        piped = petalnode("chat", "twice", "--prompt", "?", *peers, env=env)
        assert piped.code == 2 and "several versions of twice" in piped.err, piped


def test_a_person_who_says_no_has_nothing_done(shared_swarm: SharedSwarm, node_starter: Nodes, tmp_path: Path) -> None:
    made = petalnode("invite", "tiny-llama", "--json", "--peer", shared_swarm.peer, env=node_starter.env)
    link = made.objects[0]["link"]
    env = environment(tmp_path)
    with terminal("join", "--chat", env=env, cwd=tmp_path) as screen:
        screen.until("the link: ")
        screen.type(f"{link[:70]}\n{link[70:]}\n")  # as mail breaks it
        said = screen.until("Connect to them? [y/N] ")
        assert made.objects[0]["check_word"] in said and "tiny-llama@" in said and "on this machine" in said
        screen.type("y\n")
        said = screen.until("Go on? [y/N] ")
        assert "6 blocks, on 3 servers" in said and "can read what you ask" in said
        screen.type("n\n")
        screen.until("nothing was done")
        assert screen.exit_code() == 0
    assert not list(tmp_path.rglob("*.safetensors"))


def test_memory_of_a_model_nobody_hands_on(tmp_path: Path) -> None:
    """An alias comes with its weights, and nothing is fetched before a yes."""
    with announcers.Nodes() as nodes:
        server = nodes.start(blocks=[0, 15], num_blocks=30, model_name="smollm2").ready()
        env = environment(tmp_path)
        (made,) = petalnode("invite", "--json", "--peer", server.addr, env=env).objects
        with terminal("join", made["link"], "--num-blocks", "15", env=env, cwd=tmp_path) as screen:
            screen.until("Connect to them? [y/N] ")
            screen.type("y\n")
            said = " ".join(screen.until("Go on? [y/N] ").split())
            assert "15 blocks, as it looks now 15:30" in said and "at least 94 MiB will be fetched" in said
            assert re.search(r"the server will take \d+ MiB of memory", said), said
            screen.type("n\n")
            assert screen.exit_code() == 0
