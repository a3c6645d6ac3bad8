"""Nodes of js-libp2p (peer.mjs) for the tests of how others get on with petalnode's, and what is found there."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from petalnode.crypto.identity import Identity
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.protocols.ids import Span, blocks_key, ranges_of
from tests.interop.built import BUILT, NODE
from tests.nat.nodes import NodeRefused, ToldNode
from tests.node_inspection import table_of


class JsNode(ToldNode):
    """Options and commands are those of peer.mjs; `prefix` comes before the command line."""

    def __init__(self, home: Path, prefix: Sequence[str] = (), **options: Any) -> None:
        shutil.copy(Path(__file__).with_name("peer.mjs"), BUILT / "peers")
        super().__init__([*prefix, NODE, str(BUILT / "peers/peer.mjs"), json.dumps(options)], home)

    def connect(self, addr: str) -> bool:
        """Whether it got through."""
        try:
            return bool(self.ask("connect", peer=addr))
        except NodeRefused:
            return False

    def paths(self, peer: str) -> list[dict[str, str]]:
        """The connections to a peer."""
        found: list[dict[str, str]] = self.ask("paths", peer=peer)
        return found


class JsNodes:
    """Starts them, and ends all of them."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._started: list[JsNode] = []

    def start(self, *, prefix: Sequence[str] = (), **options: Any) -> JsNode:
        """Returns at once; its `ready` waits."""
        self._started.append(JsNode(self._home, prefix, **options))
        return self._started[-1]

    def end(self) -> None:
        for node in self._started:
            node.kill()


async def found_by(addr: str, version: str, blocks: int) -> tuple[set[str], list[set[str]]]:
    """The servers that a stranger finds who knows this node, and the providers that the DHT names of each range."""
    config = SwarmConfig(Identity.generate(), peers=(addr,))
    async with open_swarm(config) as swarm:
        view = await swarm.refresh(model_version=bytes.fromhex(version), sample=True, timeout=20)
        servers = view.servers(bytes.fromhex(version), now=time.time())
        named = []
        for number in ranges_of(Span(0, blocks), blocks):
            lookup = await table_of(swarm).look_up(blocks_key(version, number), timeout=20)
            named.append({contact.peer_id for contact in lookup.providers(random.Random())})
        return {server.peer_id for server in servers}, named
