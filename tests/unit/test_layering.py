"""node -> protocols -> crypto, never back; the order of the rooms in node/; and what must not be imported where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.import_graph import (
    ROOM_ORDER,
    ROOT,
    SIDE_BY_SIDE,
    TREES,
    circles,
    import_graph,
    import_statements,
    module_files,
    room,
    source_files,
)

ROOMS = ("petalnode", "node", "protocols", "crypto")
LOWER = {"node": {"node", "protocols", "crypto"}, "protocols": {"protocols", "crypto"}, "crypto": {"crypto"}}


@dataclass(frozen=True)
class Import:
    """One import: the modules of this project by their path from the root, all others by their name."""

    at: str
    module: str
    ours: bool


def sources(room: str) -> list[Path]:
    found = source_files(room)
    assert found, room
    return found


def imports(path: Path) -> Iterator[Import]:
    package = list(path.relative_to(ROOT).parent.parts)
    for node in import_statements(path):
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
        imported
        for path in sources(room)
        for imported in imports(path)
        # The package's version is the one thing that a room may ask of the face.
        if imported.ours and imported.module.split(".")[0] not in {*LOWER[room], "__version__"}
    ]
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_inside_the_package_imports_are_relative(room: str) -> None:
    wrong = [
        imported
        for path in sources(room)
        for imported in imports(path)
        if not imported.ours and imported.module.split(".")[0] in ("petalnode", "node", "protocols", "crypto", "tests")
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
        imported
        for path in sources(folder)
        for imported in imports(path)
        if not imported.ours
        and imported.module.split(".")[0] in FORBIDDEN[folder]
        # A type of a key or address is no stream.
        and not (folder == "crypto" and imported.module.startswith("libp2p.crypto"))
    ]
    assert not wrong


def test_names_of_tests_have_at_most_eight_words() -> None:
    names = [
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^(?:async )?def test_(\w+)", path.read_text(), re.MULTILINE)
    ]
    assert not [name for name in names if name.count("_") > 7]


def test_no_test_imports_from_another_test_file() -> None:
    taken = re.compile(r"^\s*(from|import) (\S+\.)?test_\w+|^\s*from tests\S* import .*\btest_", re.MULTILINE)
    assert not [path for path in (ROOT / "tests").rglob("*.py") if taken.search(path.read_text())]


def test_programs_that_no_test_runs_import_what_exists() -> None:
    """Benchmarks, canaries and checks with other software: a name that is gone would be found by who needs them."""
    files = module_files()
    missing = [
        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
        for tree in ("benchmarks", "packaging", "tests")
        for path in source_files(tree)
        for node in import_statements(path)
        if isinstance(node, ast.ImportFrom) and node.module in files
        for alias in node.names
        if f"{node.module}.{alias.name}" not in files and not alias.name.endswith("_pb2")
        if not re.search(rf"\b{alias.name}\b", files[node.module].read_text())
    ]
    assert not missing


def test_torch_enters_the_protocols_by_the_tensors_only() -> None:
    having = {
        path.name
        for path in sources("protocols")
        for imported in imports(path)
        if imported.module.split(".")[0] == "torch" or imported.module == "protocols.tensors"
    }
    assert having <= {"tensors.py"}


def test_raw_streams_stay_in_framing_and_swarm() -> None:
    outside = [
        imported
        for room in ROOMS
        for path in sources(room)
        if path.relative_to(ROOT).parts[:2] not in (("node", "network"), ("node", "swarm"))
        for imported in imports(path)
        if imported.module.split(".")[0] == "libp2p"
        and path.relative_to(ROOT).as_posix() not in ("protocols/framing.py", "crypto/identity.py")
    ]
    assert not outside
    for folder in ("node/server", "node/client", "node/cli", "node/blocks", "node/models", "protocols"):
        for path in sources(folder):
            if path.name == "framing.py":
                continue
            text = path.read_text()
            if "_raw" not in text and "RawStream" not in text:  # to parse all files takes seconds
                continue
            for node in ast.walk(ast.parse(text)):
                assert not (isinstance(node, ast.Attribute) and node.attr in ("_raw", "RawStream")), path


def test_no_name_is_taken_from_transformers_itself() -> None:
    """At the end of its first import it replaces its module: a thread that waited for it finds no names in the old."""
    taken = re.compile(r"^\s*from transformers import", re.MULTILINE)
    assert not [path for folder in ("node", "petalnode") for path in sources(folder) if taken.search(path.read_text())]


def test_a_class_name_stands_for_one_thing() -> None:
    files = [path for tree in TREES for path in source_files(tree)]
    names = Counter(name for path in files for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE))
    assert not [name for name, count in names.items() if count > 1]


def may_import(importer: str, imported: str) -> bool:
    """Whether a room of node/ may import another one."""
    lower = ROOM_ORDER.index(imported) < ROOM_ORDER.index(importer)
    return importer == imported or (lower and (importer, imported) not in SIDE_BY_SIDE)


def test_rooms_of_node_import_rooms_before_them_only() -> None:
    up = {
        (importer, module)
        for importer, imported in import_graph().items()
        for module in imported
        if room(importer) in ROOM_ORDER and room(module) in ROOM_ORDER
        if not may_import(room(importer), room(module))
    }
    assert not up


def test_every_room_of_a_node_has_its_place() -> None:
    entries = [path for path in (ROOT / "node").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert {path.stem for path in entries} - {"__init__"} == set(ROOM_ORDER)
    text = ast.get_docstring(ast.parse((ROOT / "node/__init__.py").read_text())) or ""
    assert tuple(re.findall(r"`(\w+)`", text.partition(":\n")[2])) == ROOM_ORDER


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circles(import_graph())


def test_files_and_folders_stay_readable_in_size() -> None:
    folders = Counter(path.parent for path in module_files().values())
    large = {f"{folder.relative_to(ROOT)}: {count} files" for folder, count in folders.items() if count > 16}
    for path in module_files().values():
        lines = len(path.read_text().splitlines())
        if lines > 450:
            large.add(f"{path.relative_to(ROOT)}: {lines} lines")
    assert not large


@pytest.mark.parametrize("name", [name for name in ROOM_ORDER if (ROOT / "node" / name).is_dir()])
def test_a_room_says_which_rooms_it_may_use(name: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / "node" / name / "__init__.py").read_text())) or ""
    stated = re.search(r"May use (.*)", text, re.DOTALL)
    assert stated, f"node/{name}/__init__.py"
    named = [word for word in re.findall(r"`(\w+)`", stated[1].partition("but not")[0]) if word in ROOM_ORDER]
    if "every room" in stated[1]:
        named = list(ROOM_ORDER[: ROOM_ORDER.index(name)])
    assert named
    assert all(may_import(name, other) for other in named)
    if "before" in stated[1]:
        named = list(ROOM_ORDER[: max(map(ROOM_ORDER.index, named)) + 1])
    used = {
        room(module) for importer, imported in import_graph().items() for module in imported if room(importer) == name
    }
    assert used & set(ROOM_ORDER) <= {*named, name, "errors", "version"}


@pytest.mark.parametrize("folder", sorted({path.parent for tree in TREES for path in source_files(tree)}), ids=str)
def test_every_folder_says_what_it_is_for(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))


@cache
def loaded_after() -> dict[str, set[str]]:
    """The top-level packages that a fresh interpreter has loaded after each of these imports, one behind the other.

    What nothing has loaded by then was loaded by none of those before either, and one process tells it all.
    """
    code = "import sys\n" + "".join(
        f"import {modules}\nprint({modules!r}, *sorted({{name.partition('.')[0] for name in sys.modules}}), sep=';')\n"
        for modules in IN_TURN
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return {line.split(";")[0]: set(line.split(";")[1:]) for line in done.stdout.splitlines()}


THE_FACE = "petalnode"
PROOFS = "petalnode.crypto.receipts"
STARTS = (
    "petalnode.node.cli.app, petalnode.node.cli.commands.serve, petalnode.node.cli.commands.status",
    "petalnode.node.cli.commands.bootstrap",
    "petalnode.node.cli.commands.chat, petalnode.node.cli.commands.demo",
    "petalnode.node.server.lifecycle.server, petalnode.node.models",
    "petalnode.node.swarm.swarm, petalnode.protocols.inference, petalnode.protocols.announcement",
)
IN_TURN = (THE_FACE, PROOFS, *STARTS)


@pytest.mark.parametrize("modules", STARTS)
def test_starts_without_torch(modules: str) -> None:
    assert not loaded_after()[modules] & {"torch", "transformers"}


def test_the_face_alone_imports_nothing_heavy() -> None:
    assert not loaded_after()[THE_FACE] & {"torch", "transformers", "trio", "libp2p"}


def test_what_a_node_can_prove_needs_no_network() -> None:
    assert not loaded_after()[PROOFS] & {"torch", "trio", "google"}
