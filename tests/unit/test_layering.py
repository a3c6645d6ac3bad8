"""node -> protocols -> crypto, never back; and what must not be imported where."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("petalnode", "node", "protocols", "crypto")
LOWER = {"node": {"node", "protocols", "crypto"}, "protocols": {"protocols", "crypto"}, "crypto": {"crypto"}}


@dataclass(frozen=True)
class Import:
    """One import: the modules of this project by their path from the root, all others by their name."""

    at: str
    module: str
    ours: bool


def sources(room: str) -> list[Path]:
    found = [path for path in sorted((ROOT / room).rglob("*.py")) if not path.name.endswith("_pb2.py")]
    assert found, room
    return found


def imports(path: Path) -> Iterator[Import]:
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        at = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(at, name.name, False)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield Import(at, node.module or "", False)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - 1
            # The face stands above the rooms: `...` from node/cli is the package itself.
            base = package[: len(package) - up] if up <= len(package) else []
            parts = [*base, *(node.module or "").split(".")] if node.module else base
            if node.module:
                yield Import(at, ".".join(parts), True)
            else:
                for name in node.names:
                    yield Import(at, ".".join([*parts, name.name]), True)


@pytest.mark.parametrize("room", LOWER)
def test_rooms_depend_one_way(room: str) -> None:
    wrong = [
        each
        for path in sources(room)
        for each in imports(path)
        # The package's version is the one thing that a room may ask of the face.
        if each.ours and each.module.split(".")[0] not in {*LOWER[room], "__version__"}
    ]
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_inside_the_package_imports_are_relative(room: str) -> None:
    wrong = [
        each
        for path in sources(room)
        for each in imports(path)
        if not each.ours and each.module.split(".")[0] in ("petalnode", "node", "protocols", "crypto", "tests")
    ]
    assert not wrong


FORBIDDEN = {
    "protocols": {"transformers", "libp2p", "safetensors", "typer", "rich"},
    "crypto": {"trio", "libp2p", "torch", "transformers", "google", "typer", "rich"},
    "node/network": {"torch", "transformers", "typer", "rich"},
    "node/trust": {"torch", "transformers", "typer", "rich"},
    "node/swarm": {"torch", "transformers", "typer", "rich"},
}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_room_knows_nothing_of(folder: str) -> None:
    wrong = [
        each
        for path in sources(folder)
        for each in imports(path)
        if not each.ours
        and each.module.split(".")[0] in FORBIDDEN[folder]
        # A type of a key or address is no stream.
        and not (folder == "crypto" and each.module.startswith("libp2p.crypto"))
    ]
    assert not wrong


def test_torch_enters_the_protocols_by_the_tensors_only() -> None:
    having = {
        path.name
        for path in sources("protocols")
        for each in imports(path)
        if each.module.split(".")[0] == "torch" or each.module == "protocols.tensors"
    }
    assert having <= {"tensors.py"}


def test_raw_streams_are_touched_by_the_framing_and_the_swarm_only() -> None:
    outside = [
        each
        for room in ROOMS
        for path in sources(room)
        if path.relative_to(ROOT).parts[:2] not in (("node", "network"), ("node", "swarm"))
        for each in imports(path)
        if each.module.split(".")[0] == "libp2p"
        and path.relative_to(ROOT).as_posix() not in ("protocols/framing.py", "crypto/identity.py")
    ]
    assert not outside
    for room in ("node/server", "node/client", "node/cli", "node/blocks", "node/models", "protocols"):
        for path in sources(room):
            if path.name == "framing.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                assert not (isinstance(node, ast.Attribute) and node.attr in ("_raw", "RawStream")), path


def loaded_after(module: str) -> set[str]:
    """The top-level packages in a fresh interpreter that has imported `module`."""
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "petalnode.node.cli.app, petalnode.node.cli.commands.serve, petalnode.node.cli.commands.status",
        "petalnode.node.cli.commands.bootstrap",
        "petalnode.node.cli.commands.chat, petalnode.node.cli.commands.demo",
        "petalnode.node.server.lifecycle.server, petalnode.node.models",
        "petalnode.node.swarm.swarm, petalnode.protocols.inference, petalnode.protocols.announcement",
    ],
)
def test_starts_without_torch(module: str) -> None:
    assert not loaded_after(module) & {"torch", "transformers"}


def test_the_face_alone_imports_nothing_heavy() -> None:
    assert not loaded_after("petalnode") & {"torch", "transformers", "trio", "libp2p"}


def test_what_a_node_can_prove_needs_no_network() -> None:
    assert not loaded_after("petalnode.crypto.receipts") & {"torch", "trio", "google"}
