"""Servers of the exact kind are held to the digests of the one whose place they take; who is honest is never punished.

`suspect` does what its control file says. The part of the model that some clients have holds no block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.client.deadlines import DEADLINES
from petalnode.node.client.session import stream
from petalnode.node.errors import SwarmError
from petalnode.node.testing.memory_servers import MemoryServer
from tests.inspection import call, client_of, session_of
from tests.swarm.compared_answers import PROMPT, answer, banned, set_back, without_blocks
from tests.swarm.faulty_server import order
from tests.swarm.fleet import At, Model, opened_for
from tests.swarm.memory_pool import MemoryPool, memory_pool
from tests.tiny_models import load_whole

COUNT = 12
KILLED_AT = 6
KEPT = 300.0  # seconds, of a session whose connection is lost


@dataclass(frozen=True)
class Parts:
    pool: MemoryPool
    control: Path
    folder: Path
    part: Path

    def start(self, blocks: str, **options: Any) -> MemoryServer:
        server = self.pool.start(blocks, exact=True, dtype="float32", **options)
        assert server.ready["quantisation"] == "none/exact-1"
        return server

    def lying(self, blocks: str) -> MemoryServer:
        return self.start(blocks, fault=self.control)

    def expected(self) -> list[int]:
        return answer(load_whole(self.folder), COUNT)


@pytest.fixture(scope="module")
def folders(home: Path, models: Path) -> tuple[Path, Path]:
    folder = models / "tiny-llama"
    return folder, without_blocks(folder, home / "exact-part" / "tiny-llama")


@pytest.fixture
def parts(folders: tuple[Path, Path], tmp_path: Path) -> Iterator[Parts]:
    control = tmp_path / "control.json"
    order(control)
    with memory_pool(folders[0]) as pool:
        yield Parts(pool, control, *folders)


@contextmanager
def preferring(parts: Parts, folder: Path, first: list[MemoryServer], later: list[MemoryServer]) -> Iterator[Model]:
    """A client whose sessions begin at `first`; it notes in `avoided` whom it thinks less of from then on."""
    with opened_for([*first, *later], folder, parts.pool) as model:
        set_back(model, *later)
        yield model


def generated(model: Model, chosen: Callable[[], MemoryServer], avoided: set[str]) -> list[int]:
    """An answer in whose middle a server is killed."""
    client: Any = client_of(model)
    suspect, note_loss = client.suspect, client.note_loss

    def suspected(peer_id: str, *seconds: float) -> None:
        avoided.add(peer_id)
        suspect(peer_id, *seconds)

    def lost(peer_id: str, *, admitted: bool = False) -> None:
        avoided.add(peer_id)
        note_loss(peer_id, admitted=admitted)

    def kill() -> None:
        client.suspect, client.note_loss = suspected, lost
        chosen().kill()

    mask = torch.ones_like(PROMPT)
    out = model.generate(
        PROMPT, attention_mask=mask, max_new_tokens=COUNT, do_sample=False, streamer=At({KILLED_AT: kill})
    )
    tokens: list[int] = out[0].tolist()
    return tokens


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("blocks", ["0:3", "3:6"])
def test_honest_servers_end_in_the_lost_ones_digests(parts: Parts, blocks: str) -> None:
    other = "3:6" if blocks == "0:3" else "0:3"
    beside, lost = parts.start(other), parts.start(blocks)
    start, end = map(int, blocks.split(":"))
    # Two others with other boundaries; they are asked because the one of the same blocks has other ones behind it.
    first, second = parts.start(f"{start}:{start + 1}"), parts.start(f"{start + 1}:{end}")
    avoided: set[str] = set()
    with preferring(parts, parts.part, [beside, lost], [first, second]) as model:
        with model.inference_session(max_length=60) as session:
            assert generated(model, lambda: lost, avoided) == parts.expected()
            assert session.recoveries == 1
            links = session_of(session).links
            assert len(links) == 3
            assert all(step.answered for link in links for step in link.history.inputs)
        assert not banned(model) and not avoided - {lost.peer_id}


@pytest.mark.parametrize("has_weights", [True, False])
def test_vanished_liar_does_not_get_honest_ones_punished(
    parts: Parts, has_weights: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody can tell who is wrong, a session may still come back for so long as its server keeps it."""
    if has_weights:
        monkeypatch.setattr(stream, "DEADLINES", replace(DEADLINES, path_keep=KEPT))
    else:
        request.getfixturevalue("briefly_kept")
    beside, liar = parts.start("0:3"), parts.lying("3:6")
    others = [parts.start("3:6"), parts.start("3:6")]
    order(parts.control, blocks="bit")
    avoided: set[str] = set()
    said = "has signed wrong answers" if has_weights else "one of them is wrong"
    with preferring(parts, parts.folder if has_weights else parts.part, [beside, liar], others) as model:
        with pytest.raises(SwarmError, match=said):
            generated(model, lambda: liar, avoided)
        assert client_of(model).state.totals.waits.by_cause["race"].longest < KEPT
        assert banned(model) == ({liar.peer_id} if has_weights else set())
        assert not avoided - {liar.peer_id}
        assert answer(model, COUNT) == parts.expected()  # asked again


@pytest.mark.parametrize("has_weights", [True, False])
def test_replacement_with_other_bits_is_left(parts: Parts, has_weights: bool) -> None:
    beside, honest = parts.start("0:3"), parts.start("3:6")
    either = {server.peer_id: server for server in (parts.lying("3:6"), parts.lying("3:6"))}
    avoided: set[str] = set()
    folder = parts.folder if has_weights else parts.part
    with preferring(parts, folder, [beside, *either.values()], [honest]) as model:
        with model.inference_session(max_length=60) as session:

            def chosen() -> MemoryServer:
                order(parts.control, blocks="bit")  # in sessions that begin from now on
                return either.pop(session.route[1][0])

            assert generated(model, chosen, avoided) == parts.expected()
            assert session.route[1][0] == honest.peer_id
        (liar,) = either
        assert banned(model) == ({liar} if has_weights else set())
        assert liar not in avoided or has_weights
        assert honest.peer_id not in avoided


def test_others_pushes_do_not_blame_the_computing_one(parts: Parts) -> None:
    """Once a server has answered what this client has not seen, its digests say nothing of it."""
    beside, lost, other = parts.start("0:3"), parts.start("3:6"), parts.start("3:6")
    avoided: set[str] = set()
    with preferring(parts, parts.folder, [beside, lost], [other]) as model:
        with model.inference_session(max_length=60) as session:
            answer(model, 2)

            async def pushed() -> None:
                session_of(session).links[1].server.accountable = False

            call(model, pushed)
            tokens = generated(model, lambda: lost, avoided)
            assert tokens == parts.expected()
        assert not banned(model)


def test_chains_are_compared_by_their_bits(parts: Parts) -> None:
    """Of servers for all blocks, of which one changes a bit: the tolerance of its kind would hide it."""
    one, two, liar = parts.start("0:6"), parts.start("0:6"), parts.lying("0:6")
    with opened_for([one, two, liar], parts.part, parts.pool, compare_chains=3) as model:
        assert answer(model, 4) == parts.expected()[: PROMPT.shape[1] + 4] and model.disagreements == ()
        order(parts.control, blocks="bit")
        assert answer(model, 4) == parts.expected()[: PROMPT.shape[1] + 4]
        (told,) = model.disagreements
        assert told.settled == "majority" and told.liars == (liar.peer_id,) and told.tolerance == 0
    with opened_for([one, liar], parts.folder, parts.pool, compare_chains=2) as model:
        assert answer(model, 4) == parts.expected()[: PROMPT.shape[1] + 4]
        (told,) = model.disagreements
        assert told.settled == "weights" and told.liars == (liar.peer_id,)


def test_exact_chains_are_compared_with_rounding_ones(parts: Parts) -> None:
    """Nobody who announces another kind takes what they are compared with from them."""
    rounding, liar = parts.pool.start("0:6", dtype="float32"), parts.lying("0:6")
    assert rounding.ready["quantisation"] == "none"
    with opened_for([rounding, liar], parts.folder, parts.pool, compare_chains=2) as model:
        assert answer(model, 4) == parts.expected()[: PROMPT.shape[1] + 4] and model.disagreements == ()
        order(parts.control, blocks="noise", amount=0.1)
        assert answer(model, 4) == parts.expected()[: PROMPT.shape[1] + 4]
        (told,) = model.disagreements
        assert told.settled == "weights" and told.liars == (liar.peer_id,) and told.tolerance > 0
