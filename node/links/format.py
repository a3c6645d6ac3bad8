"""Links into a swarm: what one person sends another, so that the other's machine finds the swarm and its model.

A link is `petalnode:` and base32 of: one byte of version, two of length, a `wire.Invite`, and its maker's signature
(docs/protocol.md#links). Letters of either case are the same, and white space does not count: mail breaks lines, and a
QR code of capitals is smaller.

The signature shows that nothing was changed on the way. It does not say who made the link: anybody has a key. Two
people who compare `check_word` know that both have the same link.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError
from multiaddr import Multiaddr

from ...crypto.canonical import digest
from ...crypto.identity import Identity, peer_id_from_bytes, peer_id_to_bytes, verify
from ...protocols import wire_pb2 as wire
from ...protocols.nat_traversal import readable_addrs
from ..errors import BadInput
from ..network.addresses import is_webrtc, parse_peer

DOMAIN: Final = "petalnode/invite/1"
SCHEME: Final = "petalnode:"


@dataclass(frozen=True)
class InviteLimits:
    """What a link may have."""

    version: int = 1
    max_text: int = 4096  # characters, white space included
    max_addrs: int = 4
    max_model: int = 128  # characters
    max_lifetime: float = 366 * 86400.0  # seconds
    version_bytes: int = 16  # of a model version, in links that are made here
    key_hash_bytes: int = 8


INVITE: Final = InviteLimits()
_HEAD: Final = 3  # bytes: version, length
_SIGNATURE: Final = 64  # bytes
_MODEL: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
"""Aliases, and names of models on the hub: nothing that leads out of the working folder."""
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aiou"
_CUT: Final = "copy all of it, from petalnode: to its last letter"


class LinkError(Exception):
    """A link that cannot be used; the text says why, and what to do."""


class CutLink(LinkError):
    """Its end is missing."""


@dataclass(frozen=True)
class Invite:
    """What a link says.

    Attributes:
        maker: the peer id that has signed it.
        addrs: multiaddrs of peers of the swarm, with /p2p, the best first.
        model: its name; "" for whatever the swarm serves.
        model_version: the first bytes of the model version, or all; empty without a model.
        expires: seconds since 1970.
        swarm_key: of a private swarm, 64 hexadecimal digits; None if it is not in the link.
        swarm_key_hash: what tells the private swarm's key from others; empty for the public swarm.
    """

    maker: str
    addrs: tuple[str, ...]
    model: str = ""
    model_version: bytes = b""
    expires: int = 0
    swarm_key: str | None = None
    swarm_key_hash: bytes = b""

    @property
    def dialable(self) -> list[str]:
        """The addresses but those that only browsers dial."""
        return [addr for addr in self.addrs if not is_webrtc(Multiaddr(addr))]

    @property
    def model_argument(self) -> str | None:
        """MODEL@VERSION, as commands take it."""
        return f"{self.model}@{self.model_version.hex()}" if self.model else None


def key_hash(swarm_key: str) -> bytes:
    """What a link has of a private swarm's key where it has not got the key."""
    return digest("petalnode/swarm-key/1", bytes.fromhex(swarm_key))[: INVITE.key_hash_bytes]


def is_link(text: str) -> bool:
    """Whether a text means to be a link."""
    return text.strip().lower().startswith(SCHEME)


def is_cut(text: str) -> bool:
    """Whether a text is a link that goes on, as far as can be told."""
    try:
        _decoded(text)
    except LinkError as error:
        return isinstance(error, CutLink)
    return False


def can_name(model: str) -> bool:
    """Whether a link can have this name of a model."""
    return len(model) <= INVITE.max_model and _MODEL.fullmatch(model) is not None


def to_link(invite: Invite, identity: Identity) -> str:
    """The link, signed by its maker.

    Raises:
        ValueError: a field has what no reader would take.
    """
    message = wire.Invite(
        maker=peer_id_to_bytes(identity.peer_id),
        addrs=[Multiaddr(addr).to_bytes() for addr in invite.addrs],
        model=invite.model,
        model_version=invite.model_version,
        expires=invite.expires,
        swarm_key=bytes.fromhex(invite.swarm_key or ""),
        swarm_key_hash=invite.swarm_key_hash,
    )
    _check(message)
    body = message.SerializeToString(deterministic=True)
    data = bytes([INVITE.version]) + len(body).to_bytes(2, "big") + body + identity.sign(DOMAIN, body)
    return SCHEME + base64.b32encode(data).decode().rstrip("=").lower()


def read_link(text: str, now: float) -> Invite:
    """Reads and checks a link that came from anywhere; nothing is looked up. `now`: seconds since 1970.

    Raises:
        LinkError: it is none, cut, altered, of a newer version, or has ended.
    """
    data = _decoded(text)
    body, signature = data[_HEAD:-_SIGNATURE], data[-_SIGNATURE:]
    try:
        message = wire.Invite.FromString(body)
        maker = peer_id_from_bytes(message.maker)
    except (DecodeError, ValueError):
        raise LinkError("this link was altered: ask for it again") from None
    if not verify(maker, DOMAIN, body, signature):
        raise LinkError("this link was altered, its signature does not hold: ask for it again")
    try:
        invite = _invite(message, maker)
    except ValueError as error:
        raise LinkError(f"this link is of no use, {error}: ask for another one") from None
    _check_time(invite.expires, now)
    return invite


def check_word(text: str) -> str:
    """Two words by which people compare a link; takes some 50 ms and 16 MiB.

    They are proquints (Wilkerson 2009) of 32 bits of scrypt (RFC 7914): another link with the same words takes years of
    processor time.
    """
    data = hashlib.scrypt(_decoded(text), salt=DOMAIN.encode(), n=1 << 14, r=8, p=1, maxmem=64 << 20, dklen=4)
    return "-".join(_proquint(int.from_bytes(data[at : at + 2], "big")) for at in (0, 2))


def _proquint(number: int) -> str:
    """A word of five letters for 16 bits."""
    letters = ((_CONSONANTS, 12, 15), (_VOWELS, 10, 3), (_CONSONANTS, 6, 15), (_VOWELS, 4, 3), (_CONSONANTS, 0, 15))
    return "".join(of[number >> shift & mask] for of, shift, mask in letters)


def _decoded(text: str) -> bytes:
    """The bytes of a link, of the length that it says.

    Raises:
        LinkError: it has another length, is of a newer version, or no link at all.
    """
    if len(text) > INVITE.max_text:
        raise LinkError(f"this is no link: it has more than {INVITE.max_text} characters")
    plain = "".join(text.split()).lower()
    if not plain.startswith(SCHEME):
        raise LinkError(f"this is no link: they begin with {SCHEME}")
    letters = plain.removeprefix(SCHEME).upper()
    try:
        # Whatever is missing, the head says how much there was. Of 8 letters 1, 3 or 6 stand for no whole bytes.
        whole = letters[: len(letters) - (len(letters) % 8 in (1, 3, 6))]
        data = base64.b32decode(whole + "=" * (-len(whole) % 8))
    except (binascii.Error, ValueError):
        raise LinkError(f"this link has signs that no link has: {_CUT}") from None
    if data and data[0] > INVITE.version:
        raise LinkError(
            f"this link is of a newer petalnode (version {data[0]} of links, and this one knows {INVITE.version}): "
            "update petalnode"
        )
    length = _HEAD + int.from_bytes(data[1:_HEAD], "big") + _SIGNATURE if len(data) >= _HEAD else _HEAD + _SIGNATURE
    if len(data) < length:
        raise CutLink(f"this link is cut, its end is missing: {_CUT}")
    if len(data) > length or len(whole) != len(letters) or not data[0]:
        raise LinkError(f"this link was altered, something was added to it: {_CUT}")
    return data


def _check_time(expires: int, now: float) -> None:
    ended = time.strftime("%Y-%m-%d %H:%M", time.gmtime(min(expires, 1 << 34)))
    if expires <= now:
        clock = time.strftime("%Y-%m-%d %H:%M", time.gmtime(now))
        raise LinkError(
            f"this link ended at {ended} UTC (this machine's clock says {clock}): ask for a new one "
            "(`petalnode invite` makes it)"
        )
    if expires > now + INVITE.max_lifetime:
        raise LinkError(f"this link is of no use, it ends too far ahead, at {ended} UTC: look at this machine's clock")


def _check(message: wire.Invite) -> None:
    """The limits of every field, for the writer and for readers alike. Raises ValueError."""
    checks = {
        "the number of addresses": 1 <= len(message.addrs) <= INVITE.max_addrs,
        "the model's name": not message.model or can_name(message.model),
        "the model version": (not message.model and not message.model_version)
        or (bool(message.model) and len(message.model_version) in (INVITE.version_bytes, 32)),
        "the swarm key": len(message.swarm_key) in (0, 32),
        "the hash of the swarm key": len(message.swarm_key_hash) in (0, INVITE.key_hash_bytes),
    }
    if message.swarm_key:
        checks["the hash of the swarm key"] = key_hash(message.swarm_key.hex()) == message.swarm_key_hash
    for what, fits in checks.items():
        if not fits:
            raise ValueError(f"{what} is out of range")


def _invite(message: wire.Invite, maker: str) -> Invite:
    _check(message)
    addrs = readable_addrs(message.addrs)
    if len(addrs) != len(message.addrs):
        raise ValueError("an address cannot be read")
    return Invite(
        maker=maker,
        addrs=addrs,
        model=message.model,
        model_version=message.model_version,
        expires=message.expires,
        swarm_key=message.swarm_key.hex() or None,
        swarm_key_hash=message.swarm_key_hash,
    )


@dataclass(frozen=True)
class SwarmTarget:
    """Which swarm a person means: the peers to join by, the private swarm's key, and the model (MODEL@VERSION) that
    their links name. None where they name none, or several."""

    peers: tuple[str, ...]
    psk: str | None = None
    model: str | None = None


def read_target(given: Iterable[str], psk: str | None = None) -> SwarmTarget:
    """What multiaddrs and links mean. `psk` is the private swarm's key that was given beside them.

    Raises:
        BadInput: one of them cannot be used, or is of another swarm than the key, or than another link.
    """
    peers: list[str] = []
    models: list[str | None] = []
    for text in given:
        if is_link(text):
            invite = open_link(text)
            psk = _key(invite, psk, bool(models))
            models.append(invite.model_argument)
            peers += invite.dialable
        else:
            parse_peer(text)
            peers.append(text.strip())
    return SwarmTarget(tuple(dict.fromkeys(peers)), psk, models[0] if len(set(models)) == 1 else None)


def open_link(text: str) -> Invite:
    """A link that came from anywhere, checked; nobody is asked.

    Raises:
        BadInput: it cannot be used.
    """
    try:
        invite = read_link(text, time.time())
    except LinkError as error:
        raise BadInput(str(error)) from None
    for addr in invite.dialable:
        parse_peer(addr)
    if not invite.dialable:
        raise BadInput("this link has only addresses for browsers: open it in the page, or ask for a link of a node")
    return invite


def _key(invite: Invite, psk: str | None, others: bool) -> str | None:
    """The key of the link's swarm; `others`: `psk` is that of other links, or none.

    Raises:
        BadInput: it is another one, or has to be given.
    """
    if psk is not None and key_hash(psk) != invite.swarm_key_hash:
        other = "another private swarm" if invite.swarm_key_hash else "the public swarm"
        raise BadInput(
            f"this link is of {other}, and not of the one whose key was given: leave the key or the link out"
        )
    if psk is None and invite.swarm_key_hash:
        if others:
            raise BadInput("these links are of several swarms: give those of one")
        if invite.swarm_key is None:
            raise BadInput(
                "this link is of a private swarm, and its key is not in it: give --swarm-key FILE too, the file of "
                "whoever sent the link"
            )
    return psk or invite.swarm_key
