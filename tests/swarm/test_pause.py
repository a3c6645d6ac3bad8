"""A server that is paused: its sessions move or end, nobody finds it, and it goes on when it may."""

from __future__ import annotations

from pathlib import Path

import torch

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.testing.memory_servers import MemoryServer, memory_swarm
from petalnode.protocols.announcement import ServerState
from tests.swarm.processes import until


def told(server: MemoryServer) -> list[str]:
    return [event["event"] for event in server.events if event["event"] in ("pausing", "paused", "resumed")]


def test_paused_servers_sessions_move_and_it_returns(models: Path) -> None:
    with memory_swarm() as swarm:
        servers = [swarm.start(models / "tiny-llama", "0:6", cache_tokens=1000) for _ in range(2)]
        by_id = {server.peer_id: server for server in servers if server.ready}

        def announced(server: MemoryServer) -> ServerState | None:
            record = swarm.network.view.records.get(server.peer_id)
            return None if record is None else record.content.state

        model = swarm.open_model(AutoDistributedModelForCausalLM, models / "tiny-llama")
        hidden = torch.randn(1, 1, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
        with model.inference_session(max_length=50) as session:
            session.step(hidden.repeat(1, 5, 1))
            expected = session.step(hidden)
            paused = by_id[session.route[0][0]]
            other = next(server for server in servers if server is not paused)
            paused.want_pause("somebody plays a game")
            until(lambda: paused.tallies.serving and paused.tallies.serving().state == "draining", "it drains")

            def has_moved() -> bool:
                session.position = 5
                torch.testing.assert_close(session.step(hidden), expected)
                return bool(session.route[0][0] == other.peer_id)

            until(has_moved, "the session has moved")
            until(lambda: told(paused) == ["pausing", "paused"], "nobody is left")
            assert announced(paused) is ServerState.OFFLINE and announced(other) is ServerState.ONLINE
            assert paused.tallies.serving is not None and paused.tallies.serving().state == "paused"
            (pausing,) = [event for event in paused.events if event["event"] == "pausing"]
            assert (pausing["sessions"], pausing["reason"]) == (1, "somebody plays a game")
        paused.want_pause(None)
        until(lambda: told(paused)[2:] == ["resumed"], "it serves again")
        assert announced(paused) is ServerState.ONLINE
        other.want_pause("a game there")
        until(lambda: told(other) == ["pausing", "paused"], "the other one is away")
        with model.inference_session(max_length=50) as session:
            session.step(hidden)
            assert session.route[0][0] == paused.peer_id
        model.close()


def test_short_pause_changes_nothing_for_those_staying(models: Path) -> None:
    with memory_swarm() as swarm:
        server = swarm.start(models / "tiny-llama", "0:6", cache_tokens=1000)
        assert server.ready
        model = swarm.open_model(AutoDistributedModelForCausalLM, models / "tiny-llama")
        hidden = torch.zeros(1, 1, model.config.hidden_size)
        with model.inference_session(max_length=50) as session:
            session.step(hidden)
            server.want_pause("a game")
            until(lambda: told(server) == ["pausing"], "it drains")
            session.step(hidden)
            server.want_pause(None)
            until(lambda: told(server) == ["pausing", "resumed"], "it serves again")
            session.step(hidden)
            assert session.recoveries == 0
        model.close()
