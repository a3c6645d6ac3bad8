"""Links of peers that are there now."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio
from multiaddr import Multiaddr

from ...crypto.identity import Identity
from ...protocols.announcement import ServerState
from ...protocols.framing import PeerError
from ..errors import SwarmError
from ..network.addresses import dialable, is_circuit, is_for_browsers, is_loopback, is_public, is_webrtc
from ..swarm.swarm import Swarm
from .format import INVITE, Invite, can_name, key_hash, to_link

if TYPE_CHECKING:
    import segno


@dataclass(frozen=True)
class LinkPolicy:
    """What a link that is made here has, and how long its peers have to answer."""

    lifetime: float = 7 * 86400.0  # seconds
    peers: int = 3
    asked: int = 8
    timeout: float = 4.0  # seconds


LINKS: Final = LinkPolicy()


def rank(addr: str) -> int:
    """How far away an address can be dialed from: 0 anywhere, 1 anywhere by a relay, 2 and 3 in its own network, 4 on
    its machine."""
    parsed = Multiaddr(addr)
    if is_loopback(parsed):
        return 4
    return (0 if is_public(parsed) else 2) + is_circuit(parsed)


def choose_addrs(living: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The addresses of a link, the best first: one for each peer, of few peers, and one for browsers if there is any.

    `living` has those that can be dialed, by peer id, the best known peers first. Where one can be dialed from another
    machine, those that cannot are left out.
    """
    dialed = [[addr for addr in addrs if not is_webrtc(Multiaddr(addr))] for addrs in living.values()]
    best = [min(addrs, key=rank) for addrs in dialed if addrs]
    # Strangers with better addresses do not push out the first, which this node knows best.
    chosen = sorted([*best[:1], *sorted(best[1:], key=rank)[: LINKS.peers - 1]], key=rank)
    if not any(is_for_browsers(Multiaddr(addr)) for addr in chosen):
        known = [addr for addrs in living.values() for addr in addrs if is_for_browsers(Multiaddr(addr))]
        chosen += sorted(known, key=rank)[:1]
    return tuple(addr for addr in chosen if rank(addr) < 4 or rank(chosen[0]) == 4)


def where_from(addrs: Sequence[str]) -> str:
    """Who can dial these addresses of a link, for a person; "" if everybody can."""
    least = min(map(rank, addrs))
    if least < 2:
        return ""
    return "this machine" if least == 4 else "the network that their machines are in"


def near_addrs(swarm: Swarm) -> dict[str, list[str]]:
    """This node's own addresses, and those at which it is connected to the peers that it joined by; nobody is asked."""
    found = {swarm.peer_id: swarm.addrs} if swarm.addrs else {}
    for peer_id in swarm.named:
        worked = _worked(swarm, peer_id)
        if worked and peer_id != swarm.peer_id:
            found[peer_id] = [f"{addr}/p2p/{peer_id}" for addr in worked]
    return found


def _worked(swarm: Swarm, peer_id: str) -> list[str]:
    """The addresses at which this node is connected to a peer."""
    addrs = [path.remote_addr for path in swarm.host.paths(peer_id) if path.remote_addr and not path.inbound]
    return [str(addr) for addr in map(dialable, addrs) if addr is not None]


async def living_addrs(swarm: Swarm, version: bytes | None) -> dict[str, list[str]]:
    """Addresses, with /p2p, of peers of the swarm that answer now: of this node, of those by which it joined, and of
    servers of the model. A private address counts if it can be dialed from here."""
    found = {swarm.peer_id: swarm.addrs} if swarm.addrs else {}
    said = {
        server.peer_id: server.addrs
        for server in swarm.view.servers(version, now=time.time())
        if server.state is ServerState.ONLINE and swarm.trust.ban_of(server.peer_id) is None
    }
    # Keys cost nothing: servers that have computed for this node come before others.
    others = sorted(
        {*swarm.connected(), *said}, key=lambda peer: (-swarm.trust.reputation(peer), peer not in said, peer)
    )
    order = [peer for peer in dict.fromkeys([*swarm.named, *others]) if peer != swarm.peer_id][: LINKS.asked]
    answered: dict[str, list[str]] = {}
    async with trio.open_nursery() as nursery:
        for peer_id in order:
            nursery.start_soon(_ask, swarm, peer_id, said.get(peer_id, ()), answered)
    return found | {peer_id: answered[peer_id] for peer_id in order if peer_id in answered}


async def _ask(swarm: Swarm, peer_id: str, said: Sequence[str], answered: dict[str, list[str]]) -> None:
    try:
        await swarm.ask_node(peer_id, timeout=LINKS.timeout)
    except PeerError:
        return
    worked = _worked(swarm, peer_id)
    addrs = dict.fromkeys([*worked, *swarm.host.permitted(peer_id, said)])
    proven = [addr for addr in addrs if addr in worked or rank(addr) < 2]
    for addr in [addr for addr in addrs if addr not in proven and not is_circuit(Multiaddr(addr))]:
        try:
            proven.append(await swarm.host.dial_fresh(peer_id, [Multiaddr(addr)], timeout=LINKS.timeout))
        except ConnectionError:
            continue
    if proven:
        answered[peer_id] = [f"{addr}/p2p/{peer_id}" for addr in proven]


def qr_code(link: str) -> segno.QRCode:
    """The QR code of a link."""
    import segno  # 0.05 s, for those who look at one

    # Capitals and digits take fewer modules; a link is the same in either case.
    return segno.make_qr(link.upper(), error="l")


@dataclass(frozen=True)
class LinkWishes:
    """What a link is to be for: a model by name and version, empty for whatever is served; the private swarm's key,
    which is in the link `with_key` only; and for how many seconds."""

    model: str = ""
    version: bytes = b""
    psk: str | None = None
    with_key: bool = False
    lifetime: float = LINKS.lifetime


def make_link(wishes: LinkWishes, addrs: Sequence[str], identity: Identity, now: float) -> tuple[str, Invite]:
    """The link and what it says; `now` in seconds since 1970. A model whose name no link can have is left out."""
    named = can_name(wishes.model)
    invite = Invite(
        maker=identity.peer_id,
        addrs=tuple(addrs),
        model=wishes.model if named else "",
        model_version=wishes.version[: INVITE.version_bytes] if named else b"",
        expires=int(now + wishes.lifetime),
        swarm_key=wishes.psk if wishes.with_key else None,
        swarm_key_hash=b"" if wishes.psk is None else key_hash(wishes.psk),
    )
    return to_link(invite, identity), invite


def near_link(swarm: Swarm, wishes: LinkWishes, *, without: Collection[str] = ()) -> str:
    """A link through this node and the peers that it joined by and is connected to, but not `without`; nobody is asked.
    "" if nobody is left."""
    living = {peer_id: addrs for peer_id, addrs in near_addrs(swarm).items() if peer_id not in without}
    addrs = choose_addrs(living)
    return make_link(wishes, addrs, swarm.identity, time.time())[0] if addrs else ""


def join_command(link: str, psk: str | None) -> str:
    """What somebody else types to join by a link that has not got the key of the private swarm; "" without a link."""
    return f"petalnode join {link}{'' if psk is None else ' --swarm-key FILE'}" if link else ""


async def link_now(swarm: Swarm, wishes: LinkWishes, identity: Identity) -> tuple[str, Invite]:
    """A link through peers that answer now.

    Raises:
        SwarmError: none does at an address that another machine could dial.
    """
    addrs = choose_addrs(await living_addrs(swarm, wishes.version or None))
    if not addrs:
        raise SwarmError("no peer of this swarm answers at an address that others could dial: is a server running?")
    return make_link(wishes, addrs, identity, time.time())
