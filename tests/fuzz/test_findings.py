"""What fuzzing has found, each as the least input that shows it."""

from __future__ import annotations

import pytest

from petalnode.node.client.request import pledged_points
from petalnode.node.errors import BadInput
from petalnode.node.network.addresses import dialable, parse_peer
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import DOMAIN, open_signed
from petalnode.protocols.framing import TensorError, wire_nbytes
from petalnode.protocols.nat_traversal import readable_addrs
from tests.fuzz import corpus


@pytest.mark.parametrize("span", [(0, 0), (5, 2), (0, 2)])
def test_a_pledge_for_no_blocks_or_too_few_pledges_nothing(span: tuple[int, int]) -> None:
    """It raised in the routing of every client that wants pledges."""
    message = corpus.announcement()
    message.pledge.span.start, message.pledge.span.end = span
    data = message.SerializeToString()
    signed = wire.SignedAnnouncement(announcement=data, signature=corpus.ATTACKER.sign(DOMAIN, data))
    assert pledged_points(open_signed(signed, now=corpus.NOW).content, (), corpus.NOW_MS) is None


@pytest.mark.parametrize("codec", ["none", "int8-block64"])
def test_a_shape_of_a_thousand_dimensions_is_refused_before_it_is_multiplied(codec: str) -> None:
    """The product took seconds, or was too large for a float."""
    with pytest.raises(TensorError, match="dimensions"):
        wire_nbytes([(1 << 32) - 1] * 1000, "float32", codec)


def test_a_size_that_no_float_holds_is_exact() -> None:
    assert wire_nbytes([(1 << 31) + 1] * 3, "float32", "int8-block64") == ((1 << 31) + 1) ** 3 + 2 * (
        (((1 << 31) + 1) ** 3 + 63) // 64
    )


def test_an_address_that_the_library_writes_and_cannot_read_is_none() -> None:
    with pytest.raises(BadInput):
        parse_peer("/ip6zone/example.com")
    assert dialable("/ip6zone/example.com") is None


def test_long_addresses_are_not_decoded() -> None:
    """Base58 takes time that grows with the square: 64 KiB of it took seconds."""
    long = b"\xa5\x03" + b"\xff\xff\x03" + b"\x12" * 65535  # a peer id of 64 KiB
    assert readable_addrs([long]) == ()
    with pytest.raises(BadInput, match="too long"):
        parse_peer(f"/ip4/1.2.3.4/tcp/1/p2p/{'Q' * 70_000}")
