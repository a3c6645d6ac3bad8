"""A stranger who would be taken for a trusted server: by its name, peer id or address. Trusted is a key."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from petalnode.crypto.identity import Identity
from petalnode.node.cli.join import check_peer_id
from petalnode.node.errors import BadInput, NoChainError
from petalnode.node.swarm.trusted_servers import TrustedServers
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import DOMAIN, Announcement, BadAnnouncement, ServerState, freshened, open_signed
from petalnode.protocols.ids import Span
from tests.swarm.relay_node import ECHO
from tests.swarm.relays import host_here
from tests.swarm.virtual_servers import VirtualServer, talk, virtual_swarm

OWN, STRANGER = Identity.generate(), Identity.generate()
SAID = Announcement(OWN.peer_id, b"v" * 32, "tiny", 6, Span(0, 6), ServerState.ONLINE, addrs=("/ip4/192.0.2.7/tcp/1",))


def test_nobody_announces_a_server_without_its_key() -> None:
    """Other addresses, another span or the newest sequence number for a trusted peer id."""
    now = time.time()
    data = freshened(SAID, now=now, lifetime=40.0).to_wire().SerializeToString()
    with pytest.raises(BadAnnouncement, match="signature"):
        open_signed(wire.SignedAnnouncement(announcement=data, signature=STRANGER.sign(DOMAIN, data)), now=now)
    held = open_signed(wire.SignedAnnouncement(announcement=data, signature=OWN.sign(DOMAIN, data)), now=now)
    assert held.content.peer_id == OWN.peer_id


@pytest.mark.virtual_time
@pytest.mark.parametrize("name", [OWN.peer_id, OWN.peer_id[-8:], "my own server"], ids=["peer id", "its end", "words"])
async def test_a_public_name_makes_nobody_trusted(name: str) -> None:
    async with virtual_swarm() as swarm:
        stranger: VirtualServer = swarm.start("0:6")
        said = swarm.network.view.records[stranger.peer_id].content
        stranger.node.announce(replace(said, public_name=name))
        async with swarm.client(trusted=TrustedServers(frozenset({OWN.peer_id}))) as client:
            with pytest.raises(NoChainError, match=f"{OWN.peer_id} is not in this swarm"):
                async with talk(client):
                    pass
        assert not stranger.opened


def test_only_a_peer_id_can_be_trusted() -> None:
    for text in ("my own server", OWN.peer_id[-8:], OWN.peer_id + "1", "192.0.2.7"):
        with pytest.raises(BadInput, match="--trusted"):
            check_peer_id(text, "--trusted")


async def test_who_has_taken_over_address_has_not_key() -> None:
    """A stranger listens where the trusted server did; the client dials that address for the trusted server."""
    served: list[str] = []
    async with host_here(listens=True, identity=STRANGER) as stranger, host_here() as client:

        async def serve(stream: object, peer_id: str) -> None:
            served.append(peer_id)

        stranger.set_stream_handler(ECHO, serve)
        taken = [address.replace(STRANGER.peer_id, OWN.peer_id) for address in stranger.addrs()]
        client.remember(OWN.peer_id, taken)
        with pytest.raises(ConnectionError):
            await client.open_stream(OWN.peer_id, ECHO)
        assert not client.is_connected(OWN.peer_id)
    assert served == []
