"""Links: what goes in comes out, and whatever else comes in is refused with a reason."""

from __future__ import annotations

import base64
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.crypto.identity import Identity
from petalnode.node.errors import BadInput
from petalnode.node.links.format import (
    DOMAIN,
    INVITE,
    SCHEME,
    Invite,
    LinkError,
    check_word,
    is_cut,
    is_link,
    key_hash,
    read_link,
    read_target,
    to_link,
)
from petalnode.node.links.making import LinkWishes, choose_addrs, make_link, rank, where_from
from petalnode.protocols import wire_pb2 as wire

NOW = 1_700_000_000
DAY = 86400
MAKER = Identity.from_seed(bytes(32))
PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 5)]
ADDRS = tuple(f"/ip4/203.0.113.{n}/tcp/31330/p2p/{peer}" for n, peer in enumerate(PEERS[:3]))
KEY = "ab" * 32
INVITATION = Invite(MAKER.peer_id, ADDRS, "org/a-model.v1", bytes(range(16)), NOW + DAY, KEY, key_hash(KEY))
LINK = to_link(INVITATION, MAKER)


def reason(text: str, now: float = NOW) -> str:
    with pytest.raises(LinkError) as caught:
        read_link(text, now)
    return str(caught.value)


def link_of(message: wire.Invite, version: int = 1, identity: Identity = MAKER) -> str:
    """What whoever writes bytes by hand would sign."""
    body = message.SerializeToString()
    data = bytes([version]) + len(body).to_bytes(2, "big") + body + identity.sign(DOMAIN, body)
    return SCHEME + base64.b32encode(data).decode().rstrip("=")


def message(**fields: object) -> wire.Invite:
    letters = LINK[len(SCHEME) :].upper()
    found = wire.Invite.FromString(base64.b32decode(letters + "=" * (-len(letters) % 8))[3:-64])
    for name, value in fields.items():
        if isinstance(value, list):
            del getattr(found, name)[:]
            getattr(found, name).extend(value)
        else:
            setattr(found, name, value)
    return found


@given(
    st.sampled_from(["", "smollm2", "org/name", "org/a-model.v1"]),
    st.integers(1, INVITE.max_addrs),
    st.integers(1, 366 * DAY),
    st.booleans(),
    st.booleans(),
)
def test_what_goes_in_comes_out(model: str, addrs: int, seconds: int, private: bool, with_key: bool) -> None:
    given_addrs = tuple(f"/ip4/198.51.100.{n}/tcp/4001/p2p/{PEERS[n]}" for n in range(addrs))
    wishes = LinkWishes(model, bytes(32) if model else b"", KEY if private else None, with_key and private, seconds)
    link, made = make_link(wishes, given_addrs, MAKER, NOW)
    assert read_link(link, NOW) == made
    assert made.addrs == given_addrs and made.expires == NOW + seconds
    assert (made.swarm_key is not None) == (private and with_key)


def test_short_link_may_be_typed_in_capitals() -> None:
    assert len(LINK) < 1000
    pieces = "\n ".join(LINK.upper()[at : at + 60] for at in range(0, len(LINK), 60))
    assert read_link(pieces, NOW) == INVITATION and is_link(pieces)


def test_each_fault_has_a_reason_of_its_own() -> None:
    assert "is no link" in reason("https://example.com")
    assert "is no link" in reason(SCHEME + "a" * INVITE.max_text)
    assert "signs that no link has" in reason(LINK[:40] + "8" + LINK[41:])
    assert "of a newer petalnode (version 2" in reason(link_of(message(), version=2)) and "update" in reason(
        link_of(message(), version=2)
    )
    assert "ended at 2023-11-15" in reason(LINK, NOW + DAY)
    assert "too far ahead" in reason(LINK, NOW - INVITE.max_lifetime)
    assert "was altered" in reason(link_of(message(), version=0))
    assert "was altered" in reason(link_of(message(), identity=Identity.from_seed(bytes([9]) * 32)))


@given(st.integers(0, len(LINK) - 1))
def test_a_cut_link_is_told_as_cut(length: int) -> None:
    said = reason(LINK[:length])
    assert "is cut" in said if length >= len(SCHEME) else "is no link" in said
    assert is_cut(LINK[:length]) == ("is cut" in said) and not is_cut(LINK)


@given(st.integers(len(SCHEME), len(LINK) - 2), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_no_letter_can_be_changed(at: int, letter: str) -> None:
    if LINK[at] != letter:
        reason(LINK[:at] + letter + LINK[at + 1 :])


@given(st.text("abcdefghijklmnopqrstuvwxyz234567=89 \n", min_size=1, max_size=40))
def test_nothing_can_be_added(more: str) -> None:
    if more.split():
        assert reason(LINK + more)


@given(st.text(max_size=300))
def test_any_text_is_refused(text: str) -> None:
    reason(text)
    reason(SCHEME + text)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "/etc/passwd"},
        {"model": "../model"},
        {"model": "a/../b"},
        {"model": "~/model"},
        {"model": "-option"},
        {"model": "a\x1b[2Jb"},
        {"model": "a" * (INVITE.max_model + 1)},
        {"model_version": b"short"},
        {"model_version": b""},
        {"model": "", "model_version": bytes(16)},
        {"addrs": []},
        {"addrs": [b"\xff\xff"]},
        {"addrs": [b"\x04\x01\x02\x03\x04\x06\x00\x50"] * (INVITE.max_addrs + 1)},
        {"swarm_key": b"short"},
        {"swarm_key_hash": b""},
        {"swarm_key_hash": bytes(8)},
        {"maker": b"nobody"},
    ],
)
def test_fields_out_of_range(fields: dict[str, object]) -> None:
    assert "of no use" in reason(link_of(message(**fields))) or "altered" in reason(link_of(message(**fields)))


@pytest.mark.parametrize(
    "addr", [b"\x04", b"\x04\x08\x08\x08\x08\x06\x00\x50", b"\x04\x08\x08\x08\x08\x91\x02\x00\x50"]
)
def test_undialable_address_is_refused_before_use(addr: bytes) -> None:
    with pytest.raises(BadInput):
        read_target([link_of(message(addrs=[addr], expires=int(time.time()) + DAY))])


def test_the_longest_name_of_a_model_fits() -> None:
    longest = message(model="a" * INVITE.max_model)
    assert read_link(link_of(longest), NOW).model == "a" * INVITE.max_model


def test_words_to_compare_depend_on_every_byte() -> None:
    other = to_link(replace(INVITATION, expires=INVITATION.expires + 1), MAKER)
    assert check_word(LINK) == "fuzip-mizas"  # what other versions say of the same link
    assert check_word(LINK) == check_word(LINK.upper()) == check_word(f" {LINK}\n")
    assert check_word(LINK) != check_word(other)
    first, second = check_word(LINK).split("-")
    assert len(first) == len(second) == 5 and (first + second).isalpha()


# --- which swarm


def fresh(psk: str | None = None, *, with_key: bool = False, model: str = "org/one") -> str:
    wishes = LinkWishes(model, bytes(32) if model else b"", psk, with_key)
    return make_link(wishes, ADDRS[:1], MAKER, time.time())[0]


def test_addresses_and_links_name_a_swarm_together() -> None:
    target = read_target([ADDRS[2], fresh()])
    assert target.peers == (ADDRS[2], ADDRS[0]) and target.psk is None
    assert target.model == f"org/one@{bytes(16).hex()}"
    assert read_target([ADDRS[2]]).model is None
    assert read_target([fresh(), fresh(model="org/two")]).model is None
    assert read_target([fresh(), fresh(model="")]).model is None


def test_private_swarm_is_found_by_its_key_alone() -> None:
    assert read_target([fresh(KEY, with_key=True)]).psk == KEY
    assert read_target([fresh(KEY)], KEY).psk == KEY
    for links, psk, said in (
        ([fresh(KEY)], None, "--swarm-key FILE"),
        ([fresh(KEY)], "cd" * 32, "of another private swarm"),
        ([fresh(KEY, with_key=True)], "cd" * 32, "of another private swarm"),
        ([fresh()], KEY, "of the public swarm"),
        ([fresh(), fresh(KEY, with_key=True)], None, "of several swarms"),
        ([fresh(KEY, with_key=True), fresh()], None, "of the public swarm"),
    ):
        with pytest.raises(BadInput, match=said):
            read_target(links, psk)


def test_best_addresses_come_first_undialable_ones_go() -> None:
    public, private, own = f"/ip4/8.8.8.8/tcp/1/p2p/{PEERS[0]}", f"/ip4/10.0.0.1/tcp/1/p2p/{PEERS[1]}", ""
    own = f"/ip4/127.0.0.1/tcp/1/p2p/{PEERS[2]}"
    relayed = f"/ip4/9.9.9.9/tcp/1/p2p/{PEERS[3]}/p2p-circuit/p2p/{PEERS[2]}"
    assert [rank(addr) for addr in (public, relayed, private, own)] == [0, 1, 2, 4]
    assert choose_addrs({"a": [own], "b": [private], "c": [public]}) == (public, private)
    assert choose_addrs({"a": [own, relayed], "b": [private], "c": []}) == (relayed, private)
    assert choose_addrs({"a": [own]}) == (own,)
    assert choose_addrs({}) == ()
    assert where_from((public, private)) == where_from((relayed,)) == ""
    assert (
        where_from((private, own)) == "the network that their machines are in" and where_from((own,)) == "this machine"
    )


def test_browsers_find_an_address_that_they_can_dial() -> None:
    tcp, far = f"/ip4/8.8.8.8/tcp/1/p2p/{PEERS[0]}", f"/ip4/9.9.9.9/tcp/1/p2p/{PEERS[1]}"
    page = f"/ip4/8.8.8.8/udp/1/webrtc-direct/certhash/uEiAkH5a4DPGKUuOBjYw0CgwjvcJCJMD2K_1aluKR_tpevQ/p2p/{PEERS[0]}"
    assert choose_addrs({"a": [tcp, page], "b": [far]}) == (tcp, far, page)
    assert choose_addrs({"a": [page], "b": [f"{far.replace('/p2p', '/ws/p2p')}"]})[0].startswith(
        "/ip4/9.9.9.9/tcp/1/ws"
    )
    link, _ = make_link(LinkWishes(), (tcp, page), MAKER, time.time())
    assert read_target([link]).peers == (tcp,)
    with pytest.raises(BadInput, match="only addresses for browsers"):
        read_target([make_link(LinkWishes(), (page,), MAKER, time.time())[0]])


def test_better_addressed_strangers_do_not_push_out_others() -> None:
    strangers = {str(n): [f"/ip4/8.8.8.{n}/tcp/1/p2p/{PEERS[3]}"] for n in range(1, 9)}
    private = f"/ip4/10.0.0.1/tcp/1/p2p/{PEERS[1]}"
    assert private in choose_addrs({"own": [private], **strangers})
