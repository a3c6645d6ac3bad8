"""A link is a stranger's bytes: before the question nobody is dialed, nothing is fetched, and its names stay text."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from petalnode.crypto.identity import Identity
from petalnode.node.links.making import LinkWishes, make_link
from tests.swarm.processes import environment, petalnode

STRANGER = Identity.from_seed(bytes([7]) * 32)


@pytest.fixture
def listening() -> socket.socket:
    """Where the link leads: whoever dials would be seen here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        yield server


def was_dialed(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def link_to(server: socket.socket, model: str = "stranger/model", psk: str | None = None) -> str:
    addr = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{STRANGER.peer_id}"
    wishes = LinkWishes(model, bytes(32) if model else b"", psk, psk is not None)
    return make_link(wishes, [addr], STRANGER, time.time())[0]


def test_nobody_is_dialed_and_nothing_fetched_before_question(listening: socket.socket, tmp_path: Path) -> None:
    env = environment(tmp_path)
    outcome = petalnode("join", link_to(listening), env=env)
    assert outcome.code == 2 and "add --yes" in outcome.err, outcome
    assert "stranger/model" in outcome.out and "on this machine" in outcome.out and "check word" in outcome.out
    assert not was_dialed(listening)
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("*.key"))


@pytest.mark.parametrize("command", [["chat", "--prompt", "hi"], ["api", "--http-port", "0"], ["serve"]])
def test_other_commands_fetch_no_model_a_link_names(
    command: list[str], listening: socket.socket, tmp_path: Path
) -> None:
    outcome = petalnode(*command, "--peer", link_to(listening), env=environment(tmp_path))
    assert outcome.code == 2 and "petalnode join" in outcome.err, outcome
    assert not was_dialed(listening)


def test_key_on_the_command_line_is_never_printed(listening: socket.socket, tmp_path: Path) -> None:
    psk = "ab" * 32
    outcome = petalnode("join", link_to(listening, psk=psk), env=environment(tmp_path))
    assert "read the command line" in outcome.err and "private swarm" in outcome.out, outcome
    assert psk not in outcome.out + outcome.err
    piped = petalnode("join", env=environment(tmp_path), given=link_to(listening, psk=psk))
    assert "read the command line" not in piped.err and "private swarm" in piped.out, piped


def test_link_of_another_swarm_is_refused_before_dialing(listening: socket.socket, tmp_path: Path) -> None:
    key = tmp_path / "swarm.key"
    key.write_text(f"/key/swarm/psk/1.0.0/\n/base16/\n{'cd' * 32}\n")
    key.chmod(0o600)
    for psk, said in (("ab" * 32, "another private swarm"), (None, "the public swarm")):
        outcome = petalnode(
            "join", link_to(listening, psk=psk), "--yes", "--swarm-key", str(key), env=environment(tmp_path)
        )
        assert outcome.code == 2 and said in outcome.err, outcome
    assert not was_dialed(listening)


def test_dead_peer_is_error_and_no_traceback(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = link_to(server)
    outcome = petalnode("join", link, "--yes", env=environment(tmp_path))
    assert outcome.code == 3 and "Traceback" not in outcome.err, outcome
