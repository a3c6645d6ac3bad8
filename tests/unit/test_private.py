"""The cipher of a swarm key, and what the first words tell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.network.transport.raw_connection import OtherSwarm, PskCipher

KEY = "5a" * 32


@given(st.lists(st.binary(max_size=300)), st.integers(1, 40))
def test_sealed_bytes_open_however_cut(messages, piece):
    sender, receiver = PskCipher(KEY), PskCipher(KEY)
    sealed = b"".join(sender.seal(message) for message in messages)
    opened = b"".join(receiver.open(sealed[at : at + piece]) for at in range(0, len(sealed), piece))
    assert opened == b"".join(messages)


def test_no_two_connections_look_alike():
    assert PskCipher(KEY).seal(bytes(64)) != PskCipher(KEY).seal(bytes(64))


def test_keyless_peer_is_told_from_another_keys():
    with pytest.raises(OtherSwarm, match="no swarm key"):
        PskCipher(KEY).open(b"\x13/multistream/1.0.0\n")
    said = b"\x13/multistream/1.0.0\n"
    assert PskCipher("6b" * 32).open(PskCipher(KEY).seal(said)) != said
