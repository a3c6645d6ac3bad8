"""The way to a server is cut, freezes or comes back late, while the server lives: its session is taken up again there.

Each client reaches its servers over lines that the test cuts (`tcp_proxy.py`), and over no others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import trio
from multiaddr import Multiaddr

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.session.recovery import RECOVERY
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import INFERENCE
from tests import greedy
from tests.connections import connection_lost
from tests.greedy import prompt
from tests.inspection import call, client_of, session_of
from tests.node_inspection import dial_at
from tests.slowness import Slowness
from tests.swarm.fleet import CACHE, At, Model, heard_of
from tests.swarm.processes import Nodes, until
from tests.swarm.server_pool import PooledServer, ServerPool, server_pool
from tests.swarm.tcp_proxy import Line, line_to
from tests.swarm.watched_streams import watch_opened

generate = partial(greedy.generate, max_new_tokens=12)


class Lines:
    """A client whose only way to each server is a line."""

    def __init__(self, model: Model, lines: dict[str, Line]) -> None:
        self.model = model
        self._lines = lines

        def over_the_line(peer_id: str) -> Sequence[Multiaddr] | None:
            line = lines.get(peer_id)
            return None if line is None else (Multiaddr(f"/ip4/127.0.0.1/tcp/{line.port}"),)

        dial_at(client_of(model).swarm.host, over_the_line)

    def at(self, session: Any, position: int) -> Line:
        return self._lines[session.route[position][0]]

    def to(self, peer_id: str) -> Line:
        return self._lines[peer_id]

    def all(self) -> list[Line]:
        return list(self._lines.values())

    def hang_up(self) -> None:
        """Ends the connections that were made before there were lines."""
        swarm = client_of(self.model).swarm
        for peer_id in self._lines:
            call(self.model, swarm.host.disconnect, peer_id)

    def wait_lost(self, session: Any, position: int) -> None:
        """Returns when the client has noticed that the connection is gone."""

        async def lost(peer_id: str) -> None:
            swarm = client_of(self.model).swarm
            if swarm.is_connected(peer_id):
                await connection_lost(swarm.host, peer_id).wait()

        call(self.model, lost, session.route[position][0])


@pytest.fixture(scope="module")
def pool(home: Path, models: Path, node_starter: Nodes) -> Iterator[ServerPool]:
    peer = node_starter.meeting_point().event("ready")["addrs"][0]
    with server_pool(home / "lost-paths", models / "tiny-llama", peer) as started:
        yield started


@pytest.fixture(scope="module")
def servers(pool: ServerPool) -> list[PooledServer]:
    """Nobody else holds these blocks: what is lost must be found where it was."""
    return [pool.start(blocks, *CACHE) for blocks in ("0:2", "2:4", "4:6")]


@contextmanager
def client_over_lines(servers: Sequence[PooledServer], folder: Path, peer: str) -> Iterator[Lines]:
    with ExitStack() as stack:
        lines = {
            server.peer_id: stack.enter_context(line_to("127.0.0.1", port_of(server.ready["addrs"][0])))
            for server in servers
        }
        model = stack.enter_context(
            AutoDistributedModelForCausalLM.from_pretrained(
                folder, initial_peers=[peer], allowed_servers=[server.peer_id for server in servers]
            )
        )
        heard_of(model, servers)
        opened = Lines(model, lines)
        opened.hang_up()
        yield opened


def port_of(address: str) -> int:
    return int(Multiaddr(address).value_for_protocol("tcp"))


@pytest.fixture(scope="module")
def lines(servers: list[PooledServer], pool: ServerPool, models: Path) -> Iterator[Lines]:
    with client_over_lines(servers, models / "tiny-llama", pool.peer) as opened:
        yield opened


@pytest.fixture
def over(lines: Lines) -> Lines:
    for line in lines.all():
        line.mend()
    return lines


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_connection_is_cut(position: int, over: Lines, whole: Any) -> None:
    ids = prompt(1, 9)
    with over.model.inference_session(max_length=60) as session:
        out = generate(over.model, ids, streamer=At({5: lambda: over.at(session, position).cut()}))
        assert session.recoveries == 0
        assert session_of(session).paths.rejoined == 1
    assert torch.equal(out, generate(whole, ids))


def test_all_connections_are_cut_again_and_again(over: Lines, whole: Any) -> None:
    ids = prompt(2, 9, seed=1)

    def cut() -> None:
        for line in over.all():
            line.cut()

    with over.model.inference_session(max_length=60) as session:
        out = generate(over.model, ids, max_new_tokens=20, streamer=None, logits_processor=[Every(3, cut)])
        assert session.recoveries == 0
        assert session_of(session).paths.rejoined >= 3
    assert torch.equal(out, generate(whole, ids, max_new_tokens=20))


class Every:
    """A logits processor that does something at every `n`-th token; it works for batches and beams too."""

    def __init__(self, n: int, act: Any) -> None:
        self._n, self._act, self._calls = n, act, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if self._calls % self._n == 0:
            self._act()
        return scores


def test_beams_go_on_though_replies_are_lost(over: Lines, whole: Any, slowness: Slowness) -> None:
    """A reorder that was carried out and whose answer was lost must not be carried out twice."""
    ids = prompt(1, 11, seed=2)
    options = {"num_beams": 4, "max_new_tokens": 16}
    stop = threading.Event()
    pause = 0.05 * slowness()  # each time the session has to get somewhere before the next cut

    steps, cuts = Every(1, lambda: cuts.clear()), []

    def cut_at_random() -> None:
        number = 0
        while not stop.wait(pause):
            if len(cuts) < 3 * RECOVERY.most_losses:  # that one step survives, however slow this machine is
                cuts.append(number)
                over.all()[number % 3].cut()
                number += 1

    with over.model.inference_session(max_length=40) as session:
        generate(over.model, ids, session=session, max_new_tokens=1, num_beams=4)
        session.position = 0
        session.tokens = None
        cutting = threading.Thread(target=cut_at_random)
        cutting.start()
        try:
            out = generate(over.model, ids, session=session, logits_processor=[steps], **options)
        finally:
            stop.set()
            cutting.join()
    assert torch.equal(out, generate(whole, ids, **options))


def test_connection_is_cut_in_middle_of_long_prompt(over: Lines, whole: Any) -> None:
    ids = prompt(1, 900, seed=3)
    answered: list[str] = []

    async def cut(stream: Any, frame: wire.InferenceFrame, payloads: Sequence[Any]) -> None:
        if frame.WhichOneof("body") == "reply":
            answered.append(stream.peer_id)
            if len(answered) == 3:
                await trio.to_thread.run_sync(over.to(stream.peer_id).cut)

    watch_opened(client_of(over.model).swarm, INFERENCE, received=cut)
    with over.model.inference_session(max_length=920) as session:
        out = generate(over.model, ids, session=session, max_new_tokens=4)
        assert session.recoveries == 0 and session_of(session).paths.rejoined == 1
    assert torch.equal(out, generate(whole, ids, max_new_tokens=4))


def test_a_line_that_is_down_for_a_while(over: Lines, whole: Any) -> None:
    """New connections are refused, as by the machine of a relay that is being restarted."""
    ids = prompt(1, 9, seed=4)
    times: list[float] = []
    with over.model.inference_session(max_length=60) as session:
        line: list[Line] = []

        def take_down() -> None:
            line.append(over.at(session, 1))
            line[0].take_down()
            threading.Thread(target=mend_later).start()

        def mend_later() -> None:
            reconnector = session_of(session).links[1].reconnector
            until(lambda: reconnector.state.attempts >= 3, "three attempts fail")
            line[0].mend()
            mended = monotonic()
            until(lambda: not reconnector.state.may_return, "the session is back")
            times.append(monotonic() - mended)

        out = generate(over.model, ids, streamer=At({5: take_down}))
        assert session.recoveries == 0 and session_of(session).paths.rejoined == 1
        until(lambda: bool(times), "it is told")
    assert torch.equal(out, generate(whole, ids))
    print(f"back {times[0]:.2f} s after the line")


def test_line_that_freezes_until_it_is_given_up(over: Lines, whole: Any) -> None:
    """Nobody is told: neither side hears anything any more. What was sent into it is lost."""
    ids = prompt(1, 9, seed=5)
    with over.model.inference_session(max_length=60) as session:
        begun: list[float] = []

        def freeze() -> None:
            line = over.at(session, 1)
            line.freeze()
            begun.append(monotonic())
            threading.Thread(target=thaw, args=(line,)).start()

        def thaw(line: Line) -> None:
            over.wait_lost(session, 1)
            begun.append(monotonic())
            line.cut()
            line.mend()

        out = generate(over.model, ids, streamer=At({5: freeze}))
        print(f"noticed after {begun[1] - begun[0]:.1f} s, back {monotonic() - begun[1]:.2f} s later")
        assert session.recoveries == 0 and session_of(session).paths.rejoined == 1
    assert torch.equal(out, generate(whole, ids))


def test_unused_session_is_resumed_all_the_same(over: Lines, whole: Any) -> None:
    ids = prompt(1, 9, seed=6)
    with over.model.inference_session(max_length=60) as session:
        first = generate(over.model, ids, session=session, max_new_tokens=4)
        paths = session_of(session).paths
        for line in over.all():
            line.cut()
        until(lambda: paths.rejoined == 3, "all three are back")
        out = generate(over.model, first, session=session, max_new_tokens=8)
        assert session.recoveries == 0 and paths.rejoined == 3
    assert torch.equal(out, generate(whole, ids))


@pytest.mark.usefixtures("patient")
def test_where_the_way_stays_cut_others_take_over(
    over: Lines, pool: ServerPool, whole: Any, models: Path, servers: list[PooledServer]
) -> None:
    """A server that lives but cannot be reached is replaced like a dead one."""
    ids = prompt(1, 9, seed=7)
    other = pool.start("2:4", *CACHE)
    with (
        client_over_lines([*servers, other], models / "tiny-llama", pool.peer) as opened,
        opened.model.inference_session(max_length=60) as session,
    ):
        out = generate(opened.model, ids, streamer=At({5: lambda: opened.at(session, 1).take_down()}))
        assert session.recoveries == 1 and session_of(session).paths.rejoined == 0
    assert torch.equal(out, generate(whole, ids))
    other.kill()
