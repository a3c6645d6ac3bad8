"""Peers that ask for weights: places held, questions without end, questions that are none, uploads beside sessions."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.models import Manifest, ModelFolder
from petalnode.node.models.checkpoint import Checkpoint
from petalnode.node.models.digests import part_digests
from petalnode.node.models.parts import parts_of_need
from petalnode.node.swarm.swarm import Swarm
from petalnode.node.testing import open_network
from petalnode.node.weights import holder
from petalnode.node.weights.fetching import open_weights
from petalnode.node.weights.store import number_of_part
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import PeerError
from petalnode.protocols.weights import (
    WEIGHTS,
    WEIGHTS_LIMITS,
    Offer,
    WeightsStream,
    ask_offer,
    ask_piece,
    ask_trees,
    receive_piece,
)
from tests.tiny_models import NUM_BLOCKS
from tests.weights_network import hands_on


@pytest.mark.virtual_time
@pytest.mark.parametrize("reading", [True, False])
async def test_places_are_shared_and_idle_ones_given_up(reading: bool, folder: ModelFolder, manifest: Manifest) -> None:
    """Many keys at one address hold places in silence, or do not read the pieces that they asked for; a newcomer
    elsewhere gets one at once."""
    query = wire.WeightsFrame(query=wire.WeightsQuery(model_version=manifest.version))
    piece = wire.WeightsFrame(piece_query=wire.PieceQuery(model_version=manifest.version, part=1))
    async with open_network() as network:
        server, _ = hands_on(network, folder, manifest)
        hoarders = [network.node(Identity.generate()) for _ in range(holder.HOLDING.places * 2)]
        for node in hoarders:
            network.origins[node.peer_id] = "192.0.2.1"
            stream = await node.new_stream(server.peer_id, WEIGHTS, timeout=5.0)
            for _ in range(4):
                await stream.send(query if reading else piece, timeout=5.0)
        await trio.sleep(10.0)
        newcomer = network.node(Identity.generate())
        network.origins[newcomer.peer_id] = "192.0.2.2"
        async with newcomer.open_stream(server.peer_id, WEIGHTS, timeout=5.0) as stream:
            await stream.send(query, timeout=5.0)
            answer, _ = await stream.receive(timeout=5.0)
            assert answer.HasField("offer")


@pytest.mark.virtual_time
async def test_questions_about_the_model_read_no_weights(
    folder: ModelFolder, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was not hashed before nothing is offered: no stranger has a model read."""
    monkeypatch.setenv("PETALNODE_CACHE", str(folder.path.parent / "another-cache"))
    async with open_network() as network:
        server, _ = hands_on(network, folder, manifest)
        asker = network.node(Identity.generate())
        async with asker.open_stream(server.peer_id, WEIGHTS, timeout=5.0) as stream:
            await stream.send(wire.WeightsFrame(query=wire.WeightsQuery(model_version=manifest.version)), timeout=5.0)
            answer, _ = await stream.receive(timeout=5.0)
    found = Offer.from_wire(answer.offer, NUM_BLOCKS)
    assert found.parts == {NUM_BLOCKS + 2}  # the tokenizer


@pytest.mark.virtual_time
async def test_question_longer_than_any_is_refused(
    folder: ModelFolder, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before memory for it is taken. An answer may be as long: keys of a checkpoint that has no prefix."""
    names = [f"{'long' * 20}.{number}" for number in range(WEIGHTS_LIMITS.max_bare)]
    monkeypatch.setattr(holder, "bare_names", lambda _: tuple(sorted(names)))
    async with open_network() as network:
        server, _ = hands_on(network, folder, manifest)
        asker = network.node(Identity.generate())
        async with asker.open_stream(server.peer_id, WEIGHTS, timeout=5.0) as stream:
            offer = await ask_offer(stream, manifest.version, NUM_BLOCKS, timeout=5.0)
            assert offer is not None and len(offer.bare) == len(names)
            await stream.send(wire.WeightsFrame(query=wire.WeightsQuery(model_version=bytes(300))), timeout=5.0)
            with pytest.raises(PeerError):
                await stream.receive(timeout=5.0)


@pytest.mark.virtual_time
async def test_questions_without_end_look_at_the_disk_once(
    folder: ModelFolder, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []
    honest = holder.known_trees
    monkeypatch.setattr(holder, "known_trees", lambda *given: looked.append(given) or honest(*given))
    version = manifest.version
    async with open_network() as network:
        server, _ = hands_on(network, folder, manifest)
        asker = network.node(Identity.generate())
        async with open_weights(cast(Swarm, asker), server.peer_id) as stream:
            for number in range(200):
                for frame in (
                    wire.WeightsFrame(query=wire.WeightsQuery(model_version=version)),
                    wire.WeightsFrame(tree_query=wire.TreeQuery(model_version=version, part=number % 8)),
                ):
                    await stream.send(frame, timeout=5.0)
                    await stream.receive(timeout=5.0)
                await trio.sleep(0.1)
    assert len(looked) == 1


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "question",
    [
        wire.WeightsFrame(query=wire.WeightsQuery(model_version=bytes(32))),
        wire.WeightsFrame(tree_query=wire.TreeQuery(model_version=bytes(32), part=0)),
        wire.WeightsFrame(piece_query=wire.PieceQuery(part=0)),
        wire.WeightsFrame(offer=wire.WeightsOffer()),
        wire.WeightsFrame(tree_query=wire.TreeQuery(part=99)),
        wire.WeightsFrame(piece_query=wire.PieceQuery(part=99)),
        wire.WeightsFrame(piece_query=wire.PieceQuery(part=1, piece=99)),
        wire.WeightsFrame(),
    ],
)
async def test_missing_part_is_an_error_the_stream_survives(
    question: wire.WeightsFrame, folder: ModelFolder, manifest: Manifest
) -> None:
    body = question.WhichOneof("body")
    asked = type(question).FromString(question.SerializeToString())
    if body in ("tree_query", "piece_query") and getattr(asked, body).part in (99, 1):
        getattr(asked, body).model_version = manifest.version
    async with open_network() as network:
        server, _ = hands_on(network, folder, manifest)
        asker = network.node(Identity.generate())
        async with open_weights(cast(Swarm, asker), server.peer_id) as stream:
            await stream.send(asked, timeout=5.0)
            answer, _ = await stream.receive(timeout=5.0)
            assert await ask_offer(stream, manifest.version, NUM_BLOCKS, timeout=5.0) is not None
            wanted = [(99, bytes(32)), (1, manifest.blocks[0])]
            assert (await ask_trees(stream, manifest.version, wanted, timeout=5.0)).keys() == {1}
    assert answer.WhichOneof("body") == "error"


@pytest.mark.virtual_time
async def test_question_with_tensors_ends_the_stream_unread(folder: ModelFolder, manifest: Manifest) -> None:
    async with open_network() as network:
        server, _ = hands_on(network, folder, manifest)
        asker = network.node(Identity.generate())
        async with open_weights(cast(Swarm, asker), server.peer_id) as stream:
            frame = wire.WeightsFrame(
                query=wire.WeightsQuery(model_version=manifest.version), tensors=[wire.Tensor(nbytes=100_000)]
            )
            with suppress(PeerError):
                await stream.send(frame, [bytes(100_000)], timeout=5.0)
            with pytest.raises(PeerError):
                await stream.receive(timeout=5.0)


async def twenty(
    ask: Callable[[WeightsStream], Awaitable[None]], folder: ModelFolder, manifest: Manifest, *, serving: bool
) -> float:
    """Seconds in which a peer gets twenty answers, one after the other, while others use sessions here or do not."""
    async with open_network() as network:
        server, _ = hands_on(network, folder, manifest)
        server.host.is_serving = serving  # type: ignore[misc]
        asker = network.node(Identity.generate())
        async with open_weights(cast(Swarm, asker), server.peer_id) as stream:
            begun = trio.current_time()
            for _ in range(20):
                await ask(stream)
            return trio.current_time() - begun


@pytest.mark.virtual_time
async def test_sessions_go_before_uploads(folder: ModelFolder, manifest: Manifest) -> None:
    """While peers use sessions here, all uploads together have a small part of the line, in turns by address."""

    async def ask(stream: WeightsStream) -> None:
        await ask_piece(stream, manifest.version, 1, 0, timeout=60.0)
        assert await receive_piece(stream, timeout=60.0) is not None

    assert await twenty(ask, folder, manifest, serving=False) < 1.0
    assert await twenty(ask, folder, manifest, serving=True) > 18.0


@pytest.mark.virtual_time
async def test_sessions_go_before_trees(
    folder: ModelFolder, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty bytes ask for the tree of a part, which has 32 bytes for each MiB of the part and some for each tensor."""
    part, sizes = number_of_part(0, NUM_BLOCKS), []

    async def ask(stream: WeightsStream) -> None:
        trees = await ask_trees(stream, manifest.version, [(part, manifest.digest_of(0))], timeout=60.0)
        sizes.append(trees[part].to_wire().ByteSize())

    assert await twenty(ask, folder, manifest, serving=False) < 1.0
    monkeypatch.setattr(holder, "HOLDING", replace(holder.HOLDING, beside_sessions=sizes[0]))
    assert await twenty(ask, folder, manifest, serving=True) > 18.0


@pytest.mark.virtual_time
async def test_what_changed_on_disk_is_offered_no_more(folder: ModelFolder, manifest: Manifest, tmp_path: Path) -> None:
    """Who asked for it in vain would ask again for ever."""
    copied = replace(folder, path=Path(shutil.copytree(folder.path, tmp_path / "copy" / folder.path.name)))
    part_digests(Checkpoint(copied.path), parts_of_need("all", NUM_BLOCKS))
    version = manifest.version
    async with open_network() as network:
        server, _ = hands_on(network, copied, manifest)
        asker = network.node(Identity.generate())
        async with open_weights(cast(Swarm, asker), server.peer_id) as stream:
            before = await ask_offer(stream, version, NUM_BLOCKS, timeout=5.0)
            assert before is not None and 1 in before.parts
            file = copied.path / "model.safetensors"
            file.write_bytes(bytes(file.stat().st_size))
            await ask_piece(stream, version, 1, 0, timeout=5.0)
            assert await receive_piece(stream, timeout=5.0) is None
            await trio.sleep(1.0)
            after = await ask_offer(stream, version, NUM_BLOCKS, timeout=5.0)
            assert after is not None and after.parts == before.parts - {1}
