"""Servers found through a Kademlia of js-libp2p nodes only. Run by hand, since it needs npm and its registry:

    python -m tests.interop.kademlia [FOLDER]

installs js-libp2p and Node into FOLDER (default: a temporary one), starts three of its nodes, two servers that know the
first one, and a stranger that knows the last one; then ends the first one, and looks again. The result is recorded in
docs/decisions/kademlia.md.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import trio

from petalnode.crypto.identity import Identity
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.protocols.ids import Span, blocks_key, ranges_of
from tests.node_inspection import table_of
from tests.swarm.announcers import Nodes
from tests.swarm.processes import Running, environment

HERE = Path(__file__).parent
PACKAGES = (
    *("libp2p@3", "@libp2p/kad-dht@16", "@libp2p/tcp@11", "@libp2p/identify@4", "@libp2p/ping@3"),
    *("@chainsafe/libp2p-noise@17", "@chainsafe/libp2p-yamux@8", "@multiformats/multiaddr@13"),
    "node@22",
)
BLOCKS = 30
VERSION = "5f4e7440d715" + "00" * 26
_PATIENCE = 240.0  # seconds for the first records


class JsNode(Running):
    def __init__(self, folder: Path, peers: Sequence[str], env: dict[str, str]) -> None:
        shutil.copy(HERE / "table.mjs", folder)
        super().__init__([str(folder / "node_modules/.bin/node"), str(folder / "table.mjs"), *peers], env)
        self.addr = str(json.loads(self.line())["addr"])


def installed(folder: Path) -> list[str]:
    """Installs js-libp2p unless it is there; returns what is installed."""
    if not (folder / "node_modules").exists():
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", *PACKAGES], cwd=folder, check=True)
    listed = subprocess.run(["npm", "ls", "--json"], cwd=folder, check=True, capture_output=True, text=True)
    found = json.loads(listed.stdout)["dependencies"]
    return [f"{name} {entry['version']}" for name, entry in sorted(found.items())]


async def found_by(addr: str) -> tuple[set[str], list[set[str]]]:
    """The servers that a stranger finds who knows this node, and the providers that the DHT names of each range."""
    config = SwarmConfig(Identity.generate(), peers=(addr,))
    async with open_swarm(config) as swarm:
        view = await swarm.refresh(model_version=bytes.fromhex(VERSION), sample=True, timeout=20)
        servers = view.servers(bytes.fromhex(VERSION), now=time.time())
        named = []
        for number in ranges_of(Span(0, BLOCKS), BLOCKS):
            lookup = await table_of(swarm).look_up(blocks_key(VERSION, number), timeout=20)
            named.append({contact.peer_id for contact in lookup.providers(random.Random())})
        return {server.peer_id for server in servers}, named


def main(folder: Path) -> int:
    packages = installed(folder)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as home:
        js: list[JsNode] = []
        for _ in range(3):
            js.append(JsNode(folder, [node.addr for node in js[:1]], environment(Path(home))))
            stack.callback(js[-1].kill)
        nodes = stack.enter_context(Nodes())
        options = {"peers": [js[0].addr], "num_blocks": BLOCKS, "model_version": VERSION, "ttl": 9.0}
        one, other = (nodes.start(blocks=span, **options).ready().peer_id for span in ([0, 14], [14, 30]))
        # Ranges of 4 blocks: of the fourth both have some.
        wanted = {one, other}, [{one}] * 3 + [{one, other}] + [{other}] * 4
        begun = time.monotonic()
        while (found := trio.run(found_by, js[2].addr)) != wanted:
            if time.monotonic() - begun > _PATIENCE:
                print(f"not found within {_PATIENCE:g} s; only {found}")
                return 1
        seconds = round(time.monotonic() - begun)
        js[0].kill()
        again = trio.run(found_by, js[2].addr) == wanted
        result = {"packages": packages, "found_after_s": seconds, "found_when_the_first_has_gone": again}
        print(json.dumps(result, indent=1))
        return 0 if again else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        sys.exit(main(Path(sys.argv[1]).resolve()))
    with tempfile.TemporaryDirectory() as made:
        sys.exit(main(Path(made)))
