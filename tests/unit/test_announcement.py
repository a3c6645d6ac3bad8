from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from petalnode.crypto.identity import Identity
from petalnode.node.testing import message_streams
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import (
    ANNOUNCEMENT,
    DOMAIN,
    Announcement,
    BadAnnouncement,
    RelayOffer,
    ServerState,
    counts_until,
    freshened,
    is_expired,
    open_announcement,
    open_signed,
    sign_announcement,
)
from petalnode.protocols.directory import (
    DIRECTORY_LIMITS,
    MANIFEST,
    NodeInfo,
    answer_manifests,
    ask_manifest,
    checked_records,
    last_peer_id,
    records_page,
)
from petalnode.protocols.ids import Span
from tests.statements import pledge_of

pytestmark = pytest.mark.virtual_time

NOW = 1_800_000_000.0
SERVER = Identity.from_seed(b"s" * 32)
OTHER = Identity.from_seed(b"o" * 32)


def announcement(identity: Identity = SERVER, **fields) -> Announcement:
    plain = Announcement(
        peer_id=identity.peer_id,
        model_version=b"v" * 32,
        model_name="model",
        num_blocks=30,
        span=Span(3, 9),
        state=ServerState.ONLINE,
        step_seconds=0.0125,
        forward_tokens_per_second=512.0,
        dtype="bfloat16",
        cache_tokens=100,
        cache_tokens_free=40,
        adapters=("a",),
        addrs=(f"/ip4/10.0.0.2/tcp/4001/p2p/{OTHER.peer_id}/p2p-circuit", "/dns4/example.com/tcp/4001"),
        rtts={OTHER.peer_id: 0.002},
        software_version="0.1.0",
        public_name="ünïcode",
        max_session_length=2048,
    )
    return replace(freshened(plain, now=NOW, lifetime=45), **fields)


def test_relay_offer_is_announced_though_nothing_is_free():
    for offer in (RelayOffer(free=3, reservations=5), RelayOffer(free=0, reservations=0), None):
        assert sign_announcement(SERVER, announcement(relay=offer)).content.relay == offer


def test_what_nodes_say_of_themselves_is_read_carefully():
    info = NodeInfo("server", "0.1.0", "public at 203.0.113.5:31330", RelayOffer(2, 3), 4, 5 << 40)
    assert NodeInfo.of(info.to_frame().node) == info
    read = NodeInfo.of(wire.NodeInfo(role="a\x1b[31m", reachability="x" * 9999))
    assert read.role == "a[31m" and len(read.reachability) == 256 and read.relay is None


def signed_message(message: wire.Announcement, identity: Identity = SERVER) -> wire.SignedAnnouncement:
    data = message.SerializeToString()
    return wire.SignedAnnouncement(announcement=data, signature=identity.sign(DOMAIN, data))


def test_what_was_announced_is_what_is_read():
    original = announcement()
    record = open_announcement(sign_announcement(SERVER, original).to_bytes(), now=NOW)
    assert record.content == original


def test_announcement_by_another_key_is_refused():
    with pytest.raises(ValueError, match="itself only"):
        sign_announcement(OTHER, announcement())
    with pytest.raises(BadAnnouncement, match="signature"):
        open_signed(signed_message(announcement().to_wire(), OTHER), now=NOW)


def test_another_server_s_pledge_is_refused():
    pledges = [pledge_of(by, OTHER, span=(3, 9), quantisation="none", from_ms=1, until_ms=2) for by in (SERVER, OTHER)]
    own = sign_announcement(SERVER, announcement(pledge=pledges[0]))
    assert open_signed(own.to_wire(), now=NOW).content.pledge == pledges[0]
    with pytest.raises(BadAnnouncement, match="another server"):
        open_signed(signed_message(announcement(pledge=pledges[1]).to_wire()), now=NOW)


def test_a_changed_bit_is_refused():
    record = sign_announcement(SERVER, announcement()).to_wire()
    for position in range(0, len(record.announcement), 7):
        data = bytearray(record.announcement)
        data[position] ^= 1
        with pytest.raises(BadAnnouncement):
            open_signed(wire.SignedAnnouncement(announcement=bytes(data), signature=record.signature), now=NOW)


def test_it_counts_until_expiry_plus_tolerance():
    data = sign_announcement(SERVER, announcement()).to_bytes()
    content = open_announcement(data, now=NOW).content
    assert counts_until(content) == NOW + 45 + 10
    assert open_announcement(data, now=NOW + 54).content == content
    with pytest.raises(BadAnnouncement, match="expired"):
        open_announcement(data, now=NOW + 56)
    assert is_expired(content, NOW + 56)


def test_tolerance_is_third_of_short_lifetime():
    short = freshened(announcement(), now=NOW, lifetime=3)
    assert counts_until(short) == pytest.approx(NOW + 4)


def test_times_far_ahead_are_refused():
    with pytest.raises(BadAnnouncement, match="future"):
        open_signed(sign_announcement(SERVER, announcement()).to_wire(), now=NOW - 11)
    eternal = sign_announcement(SERVER, announcement(expires=NOW + 10**6))
    with pytest.raises(BadAnnouncement, match="too far ahead"):
        open_signed(eternal.to_wire(), now=NOW)


def test_new_one_always_has_higher_sequence_number():
    first = freshened(announcement(), now=NOW, lifetime=45)
    clock_went_back = freshened(first, now=NOW - 50, lifetime=45, after=first.sequence)
    assert clock_went_back.sequence == first.sequence + 1


def test_clock_that_was_day_ahead_is_forgotten():
    """Each number above it would be of the future, and the server unknown to all until the day is over."""
    ahead = freshened(announcement(), now=NOW + 86400, lifetime=45)
    right = freshened(ahead, now=NOW, lifetime=45, after=ahead.sequence)
    assert right.sequence == int(NOW * 1e9)
    assert open_signed(sign_announcement(SERVER, right).to_wire(), now=NOW).content == right


ABSURD = {
    "span": {"span": wire.Span(start=5, end=3)},
    "empty span": {"span": wire.Span()},
    "span beyond the model": {"span": wire.Span(start=0, end=31)},
    "no blocks": {"num_blocks": 0},
    "too many blocks": {"num_blocks": 4097},
    "version": {"model_version": b"short"},
    "state": {"state": 77},
    "no state": {"state": 0},
    "step": {"step_us": 2**32 - 1},
    "addresses": {"addrs": [b"\x04\x7f\x00\x00\x01\x06\x0f\xa1"] * 17},
    "garbled address": {"addrs": [b"\xff\xff\xff"]},
    "long address": {"addrs": [b"\x04" * 257]},
    "rtts": {"rtts": [wire.Rtt(peer_id=b"x")] * 65},
    "rtt of nobody": {"rtts": [wire.Rtt(peer_id=b"x")]},
    "long name": {"model_name": "x" * 257},
    "terminal control codes": {"public_name": "\x1b[2J"},
    "cache": {"cache_tokens_free": 101},
    "peer id": {"peer_id": b"x"},
    "no peer id": {"peer_id": b""},
}


@pytest.mark.parametrize("fields", ABSURD.values(), ids=ABSURD)
def test_absurd_fields_are_refused(fields):
    message = announcement().to_wire()
    for name, value in fields.items():
        if isinstance(value, list):
            message.ClearField(name)
            getattr(message, name).extend(value)
        elif isinstance(value, wire.Span):
            message.span.CopyFrom(value)
        else:
            setattr(message, name, value)
    with pytest.raises(BadAnnouncement):
        open_signed(signed_message(message), now=NOW)


def test_what_no_reader_would_accept_is_not_signed():
    with pytest.raises(ValueError, match="span is out of range"):
        sign_announcement(SERVER, announcement(num_blocks=4))
    with pytest.raises(ValueError, match="text is out of range"):
        sign_announcement(SERVER, announcement(model_name="a\nb"))


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_never_raises_anything_else(data):
    with pytest.raises(BadAnnouncement):
        open_announcement(data, now=NOW)
    with pytest.raises(BadAnnouncement):
        open_signed(wire.SignedAnnouncement(announcement=data, signature=SERVER.sign(DOMAIN, data)), now=NOW)


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=3))
def test_garbled_addresses_are_refused_and_raise_nothing(addrs):
    message = announcement().to_wire()
    message.ClearField("addrs")
    message.addrs.extend(addrs)
    try:
        open_signed(signed_message(message), now=NOW)
    except BadAnnouncement:
        pass


def test_a_long_announcement_is_refused_unread():
    with pytest.raises(BadAnnouncement, match="too long"):
        open_announcement(bytes(ANNOUNCEMENT.max_bytes + 1), now=NOW)


def many(count: int) -> list:
    identities = [Identity.from_seed(number.to_bytes(32, "big")) for number in range(count)]
    return [sign_announcement(identity, announcement(identity)) for identity in identities]


def test_pages_together_hold_every_record_once():
    records = many(50)
    seen: list[str] = []
    after = b""
    for turn in range(10):
        page = records_page(records, after=after, limit=7).records
        opened = [record for record in checked_records(page, {}, now=NOW) if record is not None]
        seen += [record.content.peer_id for record in opened]
        after = last_peer_id(page)
        assert page.truncated == (turn < 7)
        if not page.truncated:
            break
    assert sorted(seen) == sorted(record.content.peer_id for record in records)
    assert len(set(seen)) == 50


def test_a_page_is_bounded_in_bytes():
    records = many(1)
    content = replace(records[0].content, adapters=tuple("x" * 200 for _ in range(64)))
    identities = [Identity.from_seed(number.to_bytes(32, "big")) for number in range(60)]
    fat = [sign_announcement(one, replace(content, peer_id=one.peer_id)) for one in identities]
    frame = records_page(fat)
    assert frame.records.truncated
    assert frame.ByteSize() <= DIRECTORY_LIMITS.max_page


def test_pages_bad_records_are_left_out():
    good, forged, expired = many(3)
    page = wire.DirectoryRecords(records=[good.to_wire(), forged.to_wire(), expired.to_wire()])
    page.records[1].signature = bytes(64)
    old = freshened(expired.content, now=NOW - 1000, lifetime=45)
    identity = Identity.from_seed((2).to_bytes(32, "big"))
    page.records[2].CopyFrom(sign_announcement(identity, old).to_wire())
    assert list(checked_records(page, {}, now=NOW)) == [good, None, None]


def test_known_record_is_not_confused_with_a_forgery():
    (good,) = many(1)
    page = wire.DirectoryRecords(records=[good.to_wire()])
    page.records[0].signature = bytes(64)
    assert list(checked_records(page, {good.content.peer_id: good}, now=NOW)) == [None]


async def test_a_stream_for_manifests_answers_several_questions():
    manifest = wire.Manifest(config=b"{}", blocks=[bytes(32)])
    ours, theirs = message_streams(MANIFEST, "asking", "asked")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(answer_manifests, theirs, {b"v" * 32: manifest}, timeout=10))
        for version, expected in ((b"x" * 32, None), (b"v" * 32, manifest), (b"v" * 32, manifest)):
            assert await ask_manifest(ours, version, timeout=10) == expected
        nursery.cancel_scope.cancel()


def test_known_signature_under_another_announcement_is_forgery():
    (good,) = many(1)
    page = wire.DirectoryRecords(records=[good.to_wire()])
    page.records[0].announcement = sign_announcement(OTHER, announcement(OTHER)).announcement
    assert list(checked_records(page, {good.content.peer_id: good}, now=NOW)) == [None]
