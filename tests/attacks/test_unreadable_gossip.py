"""A message by gossip that libp2p cannot read: its error ended the host of whoever listened, and all that it served."""

from __future__ import annotations

import pytest
import trio
from libp2p.crypto.pb import crypto_pb2
from libp2p.pubsub.pb import rpc_pb2

from petalnode.node.network.transport.negotiation import question
from tests.fuzz.connections import Opened, node_host
from tests.fuzz.mutation import frame
from tests.memory_muxer import DIRECT

pytestmark = pytest.mark.virtual_time

HASHED = b"\x12\x20" + b"h" * 32
"""An id that is the hash of a key, which the message has to bring along."""


def key(kind: crypto_pb2.KeyType.ValueType, data: bytes) -> bytes:
    return crypto_pb2.PublicKey(key_type=kind, data=data).SerializeToString()


@pytest.mark.parametrize(
    ("author", "brought"),
    [
        (HASHED, b"k" * 36),
        (HASHED, b"\x08\x63\x12\x01a"),
        (HASHED, key(crypto_pb2.RSA, b"garbage")),
        (HASHED, key(crypto_pb2.Ed25519, b"abc")),
        (HASHED, key(crypto_pb2.Secp256k1, b"\xff" * 33)),
        (b"", key(crypto_pb2.RSA, b"")),
        (b"\xff\xff", b"k"),
    ],
    ids=["no message", "unknown kind", "rsa", "ed25519", "secp256k1", "no author", "no id"],
)
async def test_a_message_that_cannot_be_read_ends_nobody(author: bytes, brought: bytes) -> None:
    message = rpc_pb2.Message(from_id=author, key=brought, data=b"d", seqno=b"1", topicIDs=["topic"], signature=b"s")
    said = question("/meshsub/1.1.0") + frame(rpc_pb2.RPC(publish=[message]).SerializeToString())
    async with node_host("gossip") as host:
        for _ in range(2):  # and it still listens
            with trio.fail_after(100):
                await host.feed(Opened(((1, said),), 0, DIRECT))
        assert not host.failures
