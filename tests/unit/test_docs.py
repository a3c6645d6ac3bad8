"""What the pages name exists: linked files, paths, commands, options, make targets, and the arrows of the picture."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from docs.draw_rooms import PICTURE, arrows, draw
from petalnode.node.cli import app as command_line
from tests.doc_pages import PAGES, name_of
from tests.import_graph import ROOM_ORDER, ROOT, import_graph, module_files, room_graph

TEXTS = [*PAGES, ROOT / "CHANGELOG.md"]  # which may name what is gone


def code(page: Path) -> list[str]:
    """The lines of a page's code blocks, continued ones joined, and its code spans."""
    text = page.read_text()
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"(?:^ {4}.*\n)+", rest, re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]
    return lines + spans


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_exist(page: Path) -> None:
    named = re.compile(r"(?<![\w./-])(?:node|protocols|crypto|tests|benchmarks|docs|examples|packaging)/[\w./-]*")
    for line in code(page):
        for path in named.findall(line):
            assert (ROOT / path.rstrip(".")).exists(), path


def test_every_attack_has_its_threat_and_test() -> None:
    named = re.findall(r"`(?:tests/attacks/)?(test_\w+\.py)`", (ROOT / "docs/threat-model.md").read_text())
    assert set(named) == {path.name for path in (ROOT / "tests/attacks").glob("test_*.py")}


def test_every_page_is_in_menu_of_site() -> None:
    """`make docs` fails otherwise."""
    menu = re.findall(r"(?m)^ +- (?:[^:\n]+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text())
    assert sorted(menu) == sorted(
        [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
        + ["changelog.md", "contributing.md"]
    )


@cache
def commands() -> dict[str, tuple[set[str], set[str]]]:
    """The options and the sub-commands of every command of `petalnode`."""
    found = {}
    for name, command in command_line.every_command().commands.items():
        inner = getattr(command, "commands", {})
        parameters = [parameter for part in (command, *inner.values()) for parameter in part.params]
        options = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
        found[name] = options | {"--help"}, set(inner)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_their_options_exist(page: Path) -> None:
    for line in code(page):
        for command in re.findall(r"(?:^|\s|/)petalnode (?!import\b)([a-z][\w-]*[^;&#)]*)", line):
            words = command.split()
            assert words[0] in commands(), command
            options, inner = commands()[words[0]]
            if inner and len(words) > 1:
                assert set(words[1].replace("\\", "").split("|")) <= inner, command
            wrong = set(re.findall(r"(?<!\S)--[\w-]+", command)) - options
            assert not wrong, command


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for line in code(page) for target in re.findall(r"^make ([a-z][\w-]*)", line)}
    assert named <= targets


def test_the_picture_shows_who_imports_whom() -> None:
    """If it does not: python -m docs.draw_rooms"""
    rooms = room_graph(import_graph())
    drawn = re.findall(r'data-from="(\w+)" data-to="(\w+)"', PICTURE.read_text())
    assert set(drawn) == arrows(rooms)
    assert PICTURE.read_text() == draw(rooms)


def test_the_table_of_rooms_is_in_their_order() -> None:
    table = (
        (ROOT / "docs/architecture.md").read_text().partition("\n## The rooms of node/")[2].partition("\n\nA room")[0]
    )
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert tuple(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == ROOM_ORDER


def test_decode_step_goes_way_that_is_described() -> None:
    _, _, section = (ROOT / "docs/architecture.md").read_text().partition("\n## One decode step")
    section, _, _ = section.partition("\n## ")
    rows = re.findall(r"^\| `([\w/]+\.py)` \|.*\| ([^|]*) \|$", section, re.MULTILINE)
    assert len(rows) > 10
    graph, files = import_graph(), module_files()
    names = {path: name for name, path in files.items()}
    before = [names[ROOT / rows[0][0]]]
    for path, reached in rows[1:]:
        module, (by,) = names[ROOT / path], re.findall(r"`([^`]+)`", reached)
        if by.startswith("/petalnode/"):  # both ends use the module of that protocol
            assert any(by in files[used].read_text() for caller in before for used in graph[caller] & graph[module]), (
                path
            )
        elif by.endswith(".py"):
            (caller,) = (name for name in before if f"/{files[name].relative_to(ROOT)}".endswith(f"/{by}"))
            assert module in graph[caller], path
        else:  # whoever put the two together has handed it over
            uses = [name for name in (module, *before) if re.search(rf"\b{by}\b", files[name].read_text())]
            assert module in uses and len(uses) > 1, path
        before.append(module)


def test_classes_of_the_glossary_are_where_it_says() -> None:
    for row in re.findall(r"^\| .*", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE):
        _, meaning, where = (cell.strip() for cell in row.strip("|").rsplit("|", 2))
        files = [ROOT / path for path in re.findall(r"`([^`]+\.py)`", where)]
        for name in re.findall(r"\(`([A-Z]\w+)`\)", meaning):
            named = any(f"class {name}" in path.read_text() for path in files)
            assert named or name == "Keep", row
