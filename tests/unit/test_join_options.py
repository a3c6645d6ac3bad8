from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from petalnode.crypto.identity import Identity
from petalnode.crypto.swarm_key import load_swarm_key, make_swarm_key
from petalnode.node.cli.commands.demo import even_spans, threads_per_server
from petalnode.node.cli.join import JoinOptions, RelayOptions, joins_swarm, kept_port
from petalnode.node.cli.node_report import how_joined, join_by
from petalnode.node.errors import BadInput
from petalnode.node.network.nat.relay import RelayLimits
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.discovery import JoinResult
from petalnode.protocols.ids import Span

A, B, C = (f"/ip4/203.0.113.{number}/tcp/31330/p2p/{Identity.generate().peer_id}" for number in range(1, 4))


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PETALNODE_PEERS", "PETALNODE_MDNS", "PETALNODE_REMEMBER"):
        monkeypatch.delenv(name, raising=False)


def config(options: JoinOptions, folder: Path, *, listens: bool = True) -> SwarmConfig:
    return options.config(Identity.generate(), listens=listens, data_dir=folder, relay_limits=RelayLimits())


def test_peers_come_from_the_options_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETALNODE_PEERS", f"{A}, {B} ,,")
    assert JoinOptions().peers == (A, B)
    assert JoinOptions(peer=[C, A]).peers == (C, A)
    assert JoinOptions(new_swarm=True).peers == ()
    monkeypatch.delenv("PETALNODE_PEERS")
    assert JoinOptions().peers == ()


def test_a_new_swarm_joins_nobody() -> None:
    with pytest.raises(BadInput, match="--new-swarm"):
        JoinOptions(new_swarm=True, peer=[C]).peers  # noqa: B018


def test_a_new_swarm_knows_nobody(tmp_path: Path) -> None:
    asked = config(JoinOptions(), tmp_path)
    assert asked.mdns and asked.remembered is not None
    new = config(JoinOptions(new_swarm=True), tmp_path)
    assert not new.mdns and new.remembered is None


def test_private_swarm_has_its_own_key_and_memory(tmp_path: Path) -> None:
    make_swarm_key(tmp_path / "swarm.key")
    private, public = config(JoinOptions(swarm_key=tmp_path / "swarm.key"), tmp_path), config(JoinOptions(), tmp_path)
    assert private.psk == load_swarm_key(tmp_path / "swarm.key") and public.psk is None
    assert private.remembered != public.remembered
    with pytest.raises(BadInput, match="nothing"):
        config(JoinOptions(swarm_key=tmp_path / "nothing"), tmp_path)


def test_client_has_to_be_able_to_find_swarm(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--peer"):
        config(JoinOptions(mdns=False, remember=False), tmp_path, listens=False)
    assert config(JoinOptions(mdns=False, remember=False, peer=[C]), tmp_path, listens=False).peers == (C,)
    assert config(JoinOptions(remember=False), tmp_path, listens=False).mdns
    # One that is told of a peer looks for no other.
    assert not config(JoinOptions(peer=[C]), tmp_path, listens=False).mdns


@pytest.mark.parametrize(
    ("text", "rate"),
    [("10MB", 10_000_000), ("500kB", 500_000), ("1.5 MiB/s", 1572864), ("20000", 20000), ("1GB", 10**9)],
)
def test_speeds_are_bytes_per_second(text: str, rate: int, tmp_path: Path) -> None:
    limited = config(JoinOptions(max_upload=text, max_download=text), tmp_path)
    assert limited.max_upload == limited.max_download == rate


@pytest.mark.parametrize(
    ("text", "said"), [("fast", "10MB"), ("10Mb", "bits"), ("10 Mbit", "10MB"), ("-1MB", "10MB"), ("0", "at least")]
)
def test_what_is_no_speed(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"--max-upload {text}.*{said}"):
        config(JoinOptions(max_upload=text), tmp_path)


def test_an_operator_raises_and_lowers_what_is_relayed() -> None:
    assert RelayOptions().limits() == RelayLimits()
    limits = RelayOptions(7, 0, "1MB").limits()
    assert (limits.reservations, limits.circuits, limits.bytes_per_second) == (7, 0, 1_000_000)
    with pytest.raises(BadInput, match="--relay-rate"):
        RelayOptions(relay_rate="much").limits()


def test_others_join_by_a_command_that_works(tmp_path: Path) -> None:
    address = "/ip4/11.1.1.1/tcp/1/p2p/12D3KooWX"
    assert join_by(JoinOptions(), address) == f"--peer {address}"
    make_swarm_key(tmp_path / "a.key")
    assert (
        join_by(JoinOptions(swarm_key=tmp_path / "a.key"), address)
        == f"--peer {address} --swarm-key {tmp_path / 'a.key'}"
    )


def test_a_node_says_how_it_joined() -> None:
    near = JoinResult("neighbours", "12D3KooWBhrhHZJGkd5mZzQm7dUeUqBvF9ypJTJQTtjrcDMWFXQV")
    assert "…cDMWFXQV, found on this network" in how_joined(JoinOptions(), near)
    assert "starting a swarm" in how_joined(JoinOptions(), None)
    assert "joined the swarm of /ip4" in how_joined(JoinOptions(peer=[C]), near)


def test_a_command_gets_the_shared_options() -> None:
    seen: list[object] = []
    app = typer.Typer()

    @app.command()
    @joins_swarm
    def command(
        what: Annotated[str, typer.Argument()], often: Annotated[int, typer.Option()] = 1, *, join: JoinOptions
    ) -> None:
        seen.extend((what, often, join))

    result = CliRunner().invoke(app, ["this", "-p", "/x", "--peer", "/y", "--often", "3", "--json", "--listen", "/l"])
    assert result.exit_code == 0, result.output
    assert seen == ["this", 3, JoinOptions(peer=["/x", "/y"], json=True, listen=["/l"])]
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    for name in inspect.signature(JoinOptions).parameters:
        assert "--" + name.replace("_", "-") in shown


def test_a_node_keeps_its_port() -> None:
    one, other = Identity.from_seed(bytes(32)), Identity.from_seed(bytes(31) + b"1")
    assert kept_port(one) == kept_port(Identity.from_seed(bytes(32))) != kept_port(other)
    assert all(1024 < kept_port(Identity.generate()) < 65536 for _ in range(20))


@pytest.mark.parametrize("count", range(1, 8))
def test_the_demo_s_spans_cover_the_model_evenly(count: int) -> None:
    spans = even_spans(7, count)
    assert spans[0].start == 0 and spans[-1].end == 7 and len(spans) == count
    assert all(one.end == two.start for one, two in itertools.pairwise(spans))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1
    assert isinstance(spans[0], Span)


def test_the_demo_s_servers_share_the_cores() -> None:
    assert [threads_per_server(*machine) for machine in ((8, 3), (2, 3), (1, 1))] == [2, 1, 1]
