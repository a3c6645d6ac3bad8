from __future__ import annotations

import inspect
import itertools
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from petalnode.crypto.identity import Identity
from petalnode.node.cli.demo import even_spans, threads_per_server
from petalnode.node.cli.join import JoinOptions, joins_swarm, kept_port
from petalnode.node.errors import BadInput
from petalnode.protocols.ids import Span


def test_peers_come_from_the_options_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETALNODE_PEERS", "/a, /b ,,")
    assert JoinOptions().peers == ("/a", "/b")
    assert JoinOptions(peer=["/c", "/d"]).peers == ("/c", "/d")
    assert JoinOptions(new_swarm=True).peers == ()
    monkeypatch.delenv("PETALNODE_PEERS")
    assert JoinOptions().peers == ()


def test_a_new_swarm_joins_nobody() -> None:
    with pytest.raises(BadInput, match="--new-swarm"):
        JoinOptions(new_swarm=True, peer=["/c"]).peers  # noqa: B018


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
    assert [threads_per_server(*each) for each in ((8, 3), (2, 3), (1, 1))] == [2, 1, 1]
