"""Nothing that handles bytes of a stranger is without a row in `surface/`, and no row is about what is gone."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from petalnode.crypto.identity import Identity
from petalnode.node.api.errors import MESSAGES_PATH
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.protocols import standard_pb2, wire_pb2
from petalnode.protocols.ids import StreamProtocol
from tests.attacks.stranger.catalogue import ATTACKS, SPOKEN
from tests.attacks.surface.files import FILES, READ_BY
from tests.attacks.surface.http import FIELDS, ROUTES
from tests.attacks.surface.messages import MESSAGES
from tests.attacks.surface.protocols import CONNECTION, PROTOCOLS
from tests.attacks.surface.row import Row
from tests.fuzz.targets import all_targets
from tests.swarm.processes import LOOPBACK

ROOT = Path(__file__).parents[2]
ROOMS: Mapping[str, Mapping[str, Row]] = {
    "connection": CONNECTION,
    "protocol": PROTOCOLS,
    "message": MESSAGES,
    "file": FILES,
    "route": ROUTES,
}
ROWS = {f"{room} {name}": row for room, rows in ROOMS.items() for name, row in rows.items()}
NAMED = {name: row for rows in ROOMS.values() for name, row in rows.items()}
OTHERS = ("links between machines", "JSON", "long message")
"""Targets of the fuzzing that are parts of several rows."""


def constant(path: str) -> Any:
    """What `node.swarm.view.MAX_RECORDS` or `node.swarm.view.VIEW.max_sources` names."""
    module, _, name = path.rpartition(".")
    if module.rpartition(".")[2].isupper():
        return getattr(constant(module), name)
    return getattr(importlib.import_module(f"petalnode.{module}"), name)


def bounds_of(row: Row) -> Iterator[str]:
    for bound in (row.size, row.time, row.entries):
        if bound.startswith("as "):
            assert bound.removeprefix("as ") in NAMED, f"there is no row {bound!r}"
        elif not bound.startswith("none: "):
            yield from bound.split()


@pytest.mark.parametrize("name", ROWS)
def test_bounds_tests_and_targets_are_there(name: str) -> None:
    row = ROWS[name]
    assert row.by
    for bound in bounds_of(row):
        assert constant(bound) is not None, bound
    for test in row.tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).is_file(), f"{file} is gone"
        assert not function or f"def {function}(" in (ROOT / file).read_text(), f"{test} is gone"
    targets = {target.name for target in all_targets()}
    assert set(row.fuzz) <= targets, f"no targets of the fuzzing: {set(row.fuzz) - targets}"
    assert set(row.attack) <= set(ATTACKS), f"not in the catalogue: {set(row.attack) - set(ATTACKS)}"
    assert row.tests or row.fuzz, "no test sends the worst"


async def test_every_protocol_has_a_row() -> None:
    """What libp2p registers by itself, too."""
    modules = [
        importlib.import_module(f"petalnode.protocols.{file.stem}") for file in (ROOT / "protocols").glob("*.py")
    ]
    ours = {value.id for module in modules for value in vars(module).values() if isinstance(value, StreamProtocol)}
    async with open_swarm(SwarmConfig(Identity.generate(), listen=(LOOPBACK,), gossip=True)) as swarm:
        found = {str(protocol) for protocol in swarm.host.libp2p.multiselect.handlers}
    assert found | ours == set(PROTOCOLS)
    assert set(SPOKEN) == set(PROTOCOLS), "the attackers do not send garbage on all of them"


def bodies() -> Iterator[tuple[str, Descriptor]]:
    for descriptor in wire_pb2.DESCRIPTOR.message_types_by_name.values():
        for body in (oneof for oneof in descriptor.oneofs if oneof.name == "body"):
            for field in body.fields:
                yield f"{descriptor.name}.{field.name}", field.message_type


def within(descriptor: Descriptor) -> set[str]:
    """Names of a message and of all that it holds."""
    found: set[str] = set()
    waiting = [descriptor]
    while waiting:
        one = waiting.pop()
        if one.name not in found:
            found.add(one.name)
            waiting.extend(field.message_type for field in one.fields if field.message_type is not None)
    return found


def test_every_message_has_a_row() -> None:
    known = dict(bodies())
    alone = {
        name: descriptor
        for file in (wire_pb2, standard_pb2)
        for name, descriptor in file.DESCRIPTOR.message_types_by_name.items()
    }
    assert set(known) <= set(MESSAGES), "without a row"
    assert set(MESSAGES) - set(known) <= set(alone), "of messages that are gone"
    frames = {name.partition(".")[0] for name in known}
    reached = frames.union(*map(within, known.values()), *(within(alone[name]) for name in set(MESSAGES) - set(known)))
    assert set(alone) <= reached, "in no message that has a row"


def test_every_target_of_fuzzing_is_in_row() -> None:
    named = {target for row in ROWS.values() for target in row.fuzz}
    assert {target.name for target in all_targets()} <= named | set(OTHERS)


def test_every_attack_of_catalogue_is_in_row() -> None:
    assert set(ATTACKS) == {attack for row in ROWS.values() for attack in row.attack}


_READERS = re.compile(
    r"json\.loads?|parse_json(_object)?|read_json_object|csv\.\w+|tomllib\.loads?|safe_open|load_file|Image\.open|zipfile\.ZipFile|tarfile\.open"
    r"|sqlite3\.connect|struct\.unpack\w*|pickle\.loads?|torch\.load|np\.load|yaml\.\w+|plistlib\.loads?|\w*ElementTree\.\w+"
)


def reading_modules() -> set[str]:
    """Those that call what reads a format."""
    files = [file for room in ("node", "protocols", "crypto") for file in (ROOT / room).rglob("*.py")]
    return {
        str(file.relative_to(ROOT))
        for file in files
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and _READERS.fullmatch(ast.unparse(call.func))
    }


def test_modules_that_read_a_format_say_whose() -> None:
    assert reading_modules() == set(READ_BY)
    for module, whose in READ_BY.items():
        assert all(name in NAMED or name.startswith("none: ") for name in whose), module


def routes() -> set[str]:
    """By the calls of `Route`: those of the API's rooms, of the pages and of the metrics."""
    found = set()
    for file in (file for room in ("api", "web", "monitoring") for file in (ROOT / "node" / room).rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Route":
                methods = next((word.value for word in call.keywords if word.arg == "methods"), None)
                for method in ["GET"] if methods is None else ast.literal_eval(methods):
                    found.add(f"{method} {_path(call.args[0])}")
    return {route for route in found if "{rest:path}" not in route}  # what is off


def _path(node: ast.expr) -> str:
    text = ast.unparse(node).strip("f'\"")
    return text.replace("{MESSAGES_PATH}", MESSAGES_PATH).replace("MESSAGES_PATH", MESSAGES_PATH)


def test_every_route_has_a_row() -> None:
    assert routes() == set(ROUTES)


READ = ("get", "text", "object")
"""Methods that read a field as it is; the others are given its range."""


def fields_read() -> set[str]:
    found = set()
    for file in (ROOT / "node/api").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in READ:
                first = call.args[0] if call.args else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found.add(first.value)
    return found


def test_every_field_of_a_request_has_a_bound() -> None:
    known = {name for names in FIELDS.values() for name in names.split()}
    assert fields_read() <= known
    for bound in FIELDS:
        assert constant(bound) is not None


def test_a_bound_is_named_and_not_copied() -> None:
    for file in (ROOT / "tests/attacks/surface").glob("*.py"):
        text = file.read_text().split('"""', 2)[2]
        assert not re.findall(r"[^_\w.\"/]\d{2,}", text), f"numbers in {file.name}"
