from __future__ import annotations

import multiprocessing
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.crypto.identity import (
    Identity,
    IdentityError,
    IdentityLocked,
    held_identity,
    peer_id_from_bytes,
    peer_id_to_bytes,
    verify,
)


def test_peer_id_is_the_one_of_libp2p():
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID

    seed = bytes(range(32))
    assert Identity.from_seed(seed).peer_id == ID.from_pubkey(create_new_key_pair(seed).public_key).to_base58()


def test_a_saved_identity_is_loaded_again_and_private(tmp_path):
    identity = Identity.generate()
    path = tmp_path / "new" / "id.key"
    identity.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load(path).peer_id == identity.peer_id
    assert [file.name for file in path.parent.iterdir()] == ["id.key"]


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x08\x01\x12\x40" + bytes(63), b"\x08\x01\x12\x40" + bytes(64), bytes(68)]
)
def test_a_file_that_is_no_identity_is_named(tmp_path, content):
    path = tmp_path / "id.key"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=r"id\.key"):
        Identity.load(path)


@pytest.mark.parametrize("content", [b"\x08\x01\x12\x40" + bytes(63), b"\x08\x01\x12\x40" + bytes(65), bytes(68)])
def test_foreign_file_is_told_from_a_damaged_one(tmp_path, content):
    path = tmp_path / "id.key"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match="is no Ed25519 identity"):
        Identity.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(IdentityError, match=r"gone\.key"):
        Identity.load(tmp_path / "gone.key")


def test_signature_holds_for_its_key_domain_and_message():
    identity, other = Identity.generate(), Identity.generate()
    signature = identity.sign("a", b"message")
    assert verify(identity.peer_id, "a", b"message", signature)
    assert not verify(identity.peer_id, "b", b"message", signature)
    assert not verify(identity.peer_id, "a", b"massage", signature)
    assert not verify(other.peer_id, "a", b"message", signature)


@given(st.text(max_size=70), st.binary(max_size=70))
def test_verifying_garbage_is_false_and_never_raises(peer_id, signature):
    assert not verify(peer_id, "a", b"message", signature)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_peer_id_are_refused(data):
    with pytest.raises(ValueError, match="no peer id"):
        peer_id_from_bytes(data)


def test_peer_ids_survive_the_way_over_the_wire():
    peer_id = Identity.generate().peer_id
    assert peer_id_from_bytes(peer_id_to_bytes(peer_id)) == peer_id
    for wrong in ("", "12D3KooW", peer_id[:-1], peer_id + "1", "0" * 52, "Q" * 1000):
        with pytest.raises(ValueError, match="no peer id"):
            peer_id_to_bytes(wrong)


def _hold(data_dir, role, ready, release, reported):
    with held_identity(None, role, data_dir) as identity:
        reported.put(identity.peer_id)
        ready.set()
        release.wait(200)


def test_processes_of_one_role_keep_an_identity_each(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, release, reported = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=_hold, args=(tmp_path, "server", ready, release, reported))
    process.start()
    try:
        assert ready.wait(200)
        first = reported.get(timeout=200)
        with (
            held_identity(None, "server", tmp_path) as second,
            held_identity(None, "validator", tmp_path) as third,
        ):
            assert len({first, second.peer_id, third.peer_id}) == 3
        with (
            pytest.raises(IdentityLocked, match=r"server\.key is in use"),
            held_identity(tmp_path / "server.key", "server", tmp_path),
        ):
            pass
    finally:
        release.set()
        process.join(200)
    with held_identity(None, "server", tmp_path) as again:
        assert again.peer_id == first


def test_given_identity_is_made_at_first_use(tmp_path):
    path = tmp_path / "mine.key"
    with held_identity(path, "server", tmp_path / "unused") as made:
        pass
    with held_identity(path, "server", tmp_path / "unused") as loaded:
        assert loaded.peer_id == made.peer_id
    assert not (tmp_path / "unused").exists()
