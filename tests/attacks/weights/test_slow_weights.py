"""Peers that say they hand weights on, and do so late or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from petalnode.node.models import Manifest, ModelFolder, Need, compute_manifest, resolve
from petalnode.node.testing import MemoryNetwork, MemoryNode
from petalnode.node.weights import fetching
from petalnode.node.weights.fetching import FETCHING
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from tests.tiny_models import NUM_BLOCKS, save_tiny
from tests.weights_network import NAME, Late, fetched_in_time, hands_on

TEXTS = NUM_BLOCKS + 2
"""The number of the tokenizer's files among the parts."""


def failed(answer: wire.WeightsFrame, code: wire.ErrorCode) -> list[bytes]:
    """Makes an error of `answer`."""
    answer.Clear()
    answer.error.code = code
    return []


def refused(asked: wire.WeightsFrame, answer: wire.WeightsFrame, payloads: list[bytes]) -> list[bytes]:
    """Says that it does not have what it offered, once it is asked for that."""
    if late_tree(asked) or late_piece(asked) or late_text(asked):
        return failed(answer, wire.ERROR_NOT_FOUND)
    return payloads


def piece_of_weights(asked: wire.WeightsFrame, answer: wire.WeightsFrame, payloads: list[bytes]) -> list[bytes]:
    """The same, of the weights alone: it tells what they are made of."""
    return refused(asked, answer, payloads) if late_piece(asked) else payloads


def soon(asked: wire.WeightsFrame) -> float:
    return min(late_piece(asked), 2.0)


def late_tree(asked: wire.WeightsFrame) -> float:
    """Just before the asker hangs up."""
    return 9.0 if asked.HasField("tree_query") else 0.0


def late_piece(asked: wire.WeightsFrame) -> float:
    return 110.0 if asked.HasField("piece_query") and asked.piece_query.part < TEXTS else 0.0


def late_text(asked: wire.WeightsFrame) -> float:
    return 110.0 if asked.HasField("piece_query") and asked.piece_query.part == TEXTS else 0.0


def trickled(asked: wire.WeightsFrame) -> float:
    """Less than the seconds after which a peer that brings nothing makes room."""
    return min(late_piece(asked), FETCHING.patience - 1.0)


def took(folder: ModelFolder, manifest: Manifest, liars: int, late: Late, need: Need) -> float:
    """Seconds for what a machine needs, of some liars and one that is honest and answers after all of them."""

    def setting(network: MemoryNetwork, asker: MemoryNode) -> None:
        for _ in range(liars):
            hands_on(network, folder, manifest, piece_of_weights if late in (soon, late_piece) else refused, late)
        honest, _ = hands_on(network, folder, manifest)
        network.link(asker.peer_id, honest.peer_id).delay = 0.2

    found, seconds = fetched_in_time(setting, need)
    assert need != "all" or compute_manifest(found).version == manifest.version
    return seconds


@pytest.mark.parametrize("at_one_address", [True, False])
def test_who_brings_little_yields_to_an_unasked_one(at_one_address: bool, tmp_path: Path) -> None:
    """More of them than there are places bring a true piece every now and then, and are asked first."""
    large = resolve(save_tiny("llama", tmp_path / NAME, hidden_size=256, intermediate_size=4096))
    manifest = compute_manifest(large)

    def setting(network: MemoryNetwork, asker: MemoryNode) -> None:
        for number in range(FETCHING.peers + 8):
            slow, _ = hands_on(network, large, manifest, late=trickled)
            network.origins[slow.peer_id] = "192.0.2.1" if at_one_address else f"192.0.2.{number}"
        honest, _ = hands_on(network, large, manifest)
        network.link(asker.peer_id, honest.peer_id).delay = 0.2

    _, seconds = fetched_in_time(setting, Span(0, NUM_BLOCKS))
    assert seconds < 2 * FETCHING.patience


def test_once_busy_peer_replaces_one_that_brings_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both places are taken by peers of an address each, that bring a true piece every now and then."""
    monkeypatch.setattr(fetching, "FETCHING", replace(FETCHING, peers=2))
    large = resolve(save_tiny("llama", tmp_path / NAME, hidden_size=256, intermediate_size=4096))
    manifest = compute_manifest(large)
    begun = 0.0

    def busy(asked: wire.WeightsFrame, answer: wire.WeightsFrame, payloads: list[bytes]) -> list[bytes]:
        is_busy = late_piece(asked) and trio.current_time() - begun < 1.5 * FETCHING.patience
        return failed(answer, wire.ERROR_BUSY) if is_busy else payloads

    def setting(network: MemoryNetwork, asker: MemoryNode) -> None:
        nonlocal begun
        begun = trio.current_time()
        for number in range(8):
            slow, _ = hands_on(network, large, manifest, late=trickled)
            network.origins[slow.peer_id] = f"192.0.2.{number}"
        hands_on(network, large, manifest, busy)

    _, seconds = fetched_in_time(setting, Span(0, NUM_BLOCKS))
    assert seconds < 2 * FETCHING.patience + 2 * FETCHING.most_rest


@pytest.mark.parametrize("late", [soon, late_piece])
def test_who_brings_nothing_gives_its_place_to_others(late: Late, folder: ModelFolder, manifest: Manifest) -> None:
    """There are more liars than peers are asked at once."""
    assert took(folder, manifest, FETCHING.peers + 8, late, "all") < 240.0


def test_who_is_busy_for_long_is_asked_again(folder: ModelFolder, manifest: Manifest) -> None:
    """As where many come at once for a model that few have."""

    def busy(asked: wire.WeightsFrame, answer: wire.WeightsFrame, payloads: list[bytes]) -> list[bytes]:
        if 5.0 < trio.current_time() - begun < 120.0:
            refusals.append(trio.current_time())
            return failed(answer, wire.ERROR_BUSY)
        return payloads

    def setting(network: MemoryNetwork, asker: MemoryNode) -> None:
        nonlocal begun
        begun = trio.current_time()
        hands_on(network, folder, manifest, busy, lambda asked: 6.0 if late_piece(asked) else 0.0)

    begun, refusals = 0.0, list[float]()
    found, _ = fetched_in_time(setting, "all")
    assert compute_manifest(found).version == manifest.version
    # The longer it fails, the longer it is left alone.
    assert refusals[-1] - refusals[-2] > FETCHING.rest + 2.0 and len(refusals) < 24


def test_peers_that_hold_nothing_keep_nobody_unasked(folder: ModelFolder, manifest: Manifest) -> None:
    """They are more than are asked at once, and answer for ever."""

    def empty(asked: wire.WeightsFrame, answer: wire.WeightsFrame, payloads: list[bytes]) -> list[bytes]:
        if answer.HasField("offer") and trio.current_time() - begun > 0.01:  # what the model is made of was told
            answer.offer.parts = b""
        return piece_of_weights(asked, answer, payloads)

    def setting(network: MemoryNetwork, asker: MemoryNode) -> None:
        nonlocal begun
        begun = trio.current_time()
        for _ in range(FETCHING.looked_at + 8):
            peer, _ = hands_on(network, folder, manifest, empty)
            network.link(asker.peer_id, peer.peer_id).used = True  # connected, so asked first
        honest, _ = hands_on(network, folder, manifest)
        network.link(asker.peer_id, honest.peer_id).delay = 0.2

    begun = 0.0
    found, _ = fetched_in_time(setting, Span(0, 1))
    assert found.path.is_dir()


def test_no_number_of_silent_peers_keeps_last_pieces(folder: ModelFolder, manifest: Manifest) -> None:
    """They are asked for all that is left, with one that is honest and has nothing else to do."""
    assert took(folder, manifest, 3, late_piece, Span(0, 1)) < 60.0


def test_late_telling_of_a_models_parts_delays_nobody(folder: ModelFolder, manifest: Manifest) -> None:
    """Thirty peers refuse each question, just before the asker hangs up."""
    assert took(folder, manifest, 30, late_tree, "client") < 2 * 30 * FETCHING.open + 120.0  # trees, then texts


def test_late_tokenizer_delays_nobody(folder: ModelFolder, manifest: Manifest) -> None:
    assert took(folder, manifest, 30, late_text, "client") < 30 * FETCHING.open + 120.0
