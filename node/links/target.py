"""Which swarm a person means by the addresses and links that were given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import BadInput
from ..network.addresses import parse_peer
from .format import Invite, LinkError, is_link, key_hash, read_link


@dataclass(frozen=True)
class SwarmTarget:
    """Which swarm a person means: the peers to join by, the private swarm's key, and the model (MODEL@VERSION) that
    their links name; None where they name none, or several."""

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
            peers += invite.addrs
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
        invite = read_link(text)
    except LinkError as error:
        raise BadInput(str(error)) from None
    for addr in invite.addrs:
        parse_peer(addr)
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
