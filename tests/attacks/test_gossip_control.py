"""Control messages of gossipsub name other topics and peers without end: none of it is kept, and nobody is dialed."""

from __future__ import annotations

from libp2p.pubsub.pb import rpc_pb2

from petalnode.node.network.gossip import bounded_control


def test_only_the_topic_counts_and_little_of_it() -> None:
    ids = [b"%040x" % number for number in range(5000)]
    pruned = rpc_pb2.PeerInfo(peerID=b"p" * 38, signedPeerRecord=b"r" * 100)
    others = [str(number) for number in range(5000)]
    flood = rpc_pb2.ControlMessage(
        ihave=[rpc_pb2.ControlIHave(topicID=name) for name in others],
        graft=[rpc_pb2.ControlGraft(topicID=name) for name in others],
        prune=[rpc_pb2.ControlPrune(topicID=name, backoff=1 << 40) for name in others],
    )
    assert bounded_control(flood, "topic") == rpc_pb2.ControlMessage()
    own = rpc_pb2.ControlMessage(
        ihave=[rpc_pb2.ControlIHave(topicID="topic", messageIDs=ids)] * 100,
        iwant=[rpc_pb2.ControlIWant(messageIDs=ids)] * 100,
        graft=[rpc_pb2.ControlGraft(topicID="topic")] * 100,
        prune=[rpc_pb2.ControlPrune(topicID="topic", peers=[pruned], backoff=1 << 40)] * 100,
    )
    kept = bounded_control(own, "topic")
    assert len(kept.ihave) == len(kept.iwant) == len(kept.graft) == len(kept.prune) == 1
    assert {len(entry.messageIDs) for entry in (*kept.ihave, *kept.iwant)} == {256}
    assert {prune.backoff for prune in kept.prune} == {3600} and not any(prune.peers for prune in kept.prune)


def test_what_is_asked_for_counts_once_however_often() -> None:
    again = rpc_pb2.ControlMessage(iwant=[rpc_pb2.ControlIWant(messageIDs=[b"aa"] * 256)] * 8)
    assert list(bounded_control(again, "topic").iwant) == [rpc_pb2.ControlIWant(messageIDs=[b"aa"])]
    names = [b"a" * 256, b"b"]
    some = rpc_pb2.ControlMessage(iwant=[rpc_pb2.ControlIWant(messageIDs=[name, b"x" * 257]) for name in names])
    assert list(bounded_control(some, "topic").iwant) == [rpc_pb2.ControlIWant(messageIDs=names)]
