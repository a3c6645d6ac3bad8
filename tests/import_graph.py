"""Who imports whom in this checkout, read from the sources: lazy imports and those for types only are imports too."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TREES = ("node", "protocols", "crypto")

# Each room of node/ may import the rooms before it; `client` and `server` stand side by side.
ROOM_ORDER = (
    *("errors", "version", "models", "blocks", "network", "trust", "swarm", "links", "weights", "verification"),
    *("placement", "client", "server", "validator", "tuning", "credits", "api", "monitoring", "web", "cli", "testing"),
)
SIDE_BY_SIDE = {("server", "client")}

Graph = dict[str, set[str]]


def source_files(tree: str) -> list[Path]:
    """The Python files of a tree but for those that protoc generates."""
    return [path for path in sorted((ROOT / tree).rglob("*.py")) if not path.name.endswith("_pb2.py")]


@cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Those of a file, lazy ones included. To parse all files takes seconds."""
    found, left = [], list[ast.AST]([ast.parse(path.read_text())])
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif not isinstance(node, ast.expr):
            left += ast.iter_child_nodes(node)
    return tuple(found)


def module_files() -> dict[str, Path]:
    """Every module of the rooms by its dotted name, such as `petalnode.node.swarm.view`."""
    modules = {}
    for path in (path for tree in TREES for path in source_files(tree)):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(["petalnode", *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    return modules


@cache
def import_graph() -> Graph:
    """The modules that each module imports, by dotted name. Nobody may change it."""
    modules = module_files()
    graph: Graph = {name: set() for name in modules}
    for name, path in modules.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for node in import_statements(path):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                target = f"{base}.{alias.name}"
                graph[name].add(target if target in modules else base)
        graph[name] = {target for target in graph[name] if target in modules and target != name}
    return graph


def room(module: str) -> str:
    """`swarm` for petalnode.node.swarm.view, `crypto` for petalnode.crypto.receipts, `node` for the package itself."""
    parts = module.split(".")[1:]
    return parts[1] if parts[0] == "node" and len(parts) > 1 else parts[0]


def room_graph(graph: Mapping[str, Iterable[str]]) -> Graph:
    """The rooms that each room imports."""
    rooms: Graph = {}
    for importer, imported in graph.items():
        rooms.setdefault(room(importer), set()).update(room(module) for module in imported)
    return {name: used - {name} for name, used in rooms.items() if name != "node"}


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan, 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for imported in sorted(graph.get(module, ())):
            if imported not in index:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], index[imported])
        if lowest[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found
