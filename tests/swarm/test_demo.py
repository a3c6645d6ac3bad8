"""`petalnode demo` on the real default model: the answer, and nothing left behind however it ends.

Its servers start the usual way.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil
import pytest
import trio

from petalnode.node.cli.commands.api import ApiOptions
from petalnode.node.cli.commands.demo import WebOptions, _page, demo, has_screen
from petalnode.node.cli.output import Output
from petalnode.node.errors import BadInput, MachineError, ModelError
from petalnode.node.models import resolve
from petalnode.node.models.cache_dir import cache_dir
from petalnode.node.models.progress import no_progress
from tests.swarm import warm_python
from tests.swarm.processes import STOP_TIMEOUT, environment, petalnode, until


@pytest.fixture(scope="module")
def env(home: Path) -> dict[str, str]:
    """Takes the model from the person's own cache if it is there, because importing it takes a while."""
    # pip's settings, which may name the package index, are where the person's home says.
    own = environment(home) | {"HOME": os.environ.get("HOME", str(home))}
    own.pop("HF_HUB_OFFLINE")
    try:
        resolve("smollm2", need="all", progress=no_progress, offline=True)
    except ModelError:
        return own
    return own | {"PETALNODE_CACHE": str(cache_dir())}


def servers_of(demo: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(demo).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "serve" in child.cmdline():
                found.append(child)
    return found


def runs(process: psutil.Process) -> bool:
    """Whether it does anything: a zombie only waits for somebody to ask how it ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_capital_of_france(env: dict[str, str]) -> None:
    """Without a terminal and a question, that is what is asked."""
    outcome = petalnode("demo", "--servers", "3", "--json", "--max-new-tokens", "40", env=env, timeout=380)
    assert outcome.code == 0, outcome
    (answer,) = outcome.objects
    assert "Paris" in answer["text"], answer
    assert [hop["blocks"] for hop in answer["route"]] == [[0, 10], [10, 20], [20, 30]]
    assert len({hop["peer_id"] for hop in answer["route"]}) == 3
    assert "Traceback" not in outcome.err, outcome


ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
WEB = ("--web", "--no-open", "--http-port", "0")
"""Of the one that is ended by Ctrl-C: its chat is a page."""


def has_its_page(output: Path, demo: warm_python.Process) -> None:
    """Waits until the demo with a page is ready; its first line says where."""
    until(lambda: "ready:" in output.read_text() or demo.poll() is not None, "the page is there", timeout=100)
    found = re.match(r"(http://127\.0\.0\.1:\d+) has the chat page", output.read_text())
    assert found, output.read_text()
    assert "<pn-page>" in httpx.get(found[1], timeout=None).text
    swarm = httpx.get(f"{found[1]}/v1/petalnode/swarm", timeout=None).json()
    assert (swarm["model"], swarm["coverage"]) == ("smollm2", [1] * 30)


@pytest.fixture(scope="module")
def page_output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo with a page prints."""
    return tmp_path_factory.mktemp("demo") / "output"


@pytest.fixture(scope="module")
def demos(env: dict[str, str], page_output: Path) -> Iterator[dict[signal.Signals, warm_python.Process]]:
    """A demo for each way to end it, started side by side; with a terminal, so that it waits for questions."""
    command = [sys.executable, "-m", "petalnode", "demo", "--servers", "1"]
    ours, theirs = os.openpty()
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with page_output.open("w") as output:
        started = {number: warm_python.start(command, env, stdin=theirs, **silent) for number in ENDS[:2]}
        page = silent | {"stdout": output}
        started[signal.SIGINT] = warm_python.start([*command, *WEB], env, stdin=theirs, **page)
    try:
        yield started
    finally:
        for demo in started.values():
            demo.kill()
            demo.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("number", ENDS)
def test_no_server_outlives_the_demo(
    number: signal.Signals, demos: dict[signal.Signals, warm_python.Process], page_output: Path
) -> None:
    demo = demos[number]
    until(lambda: demo.poll() is not None or bool(servers_of(demo.pid)), "the server starts", timeout=100)
    assert demo.poll() is None
    if number is signal.SIGINT:
        has_its_page(page_output, demo)
    servers = servers_of(demo.pid)
    try:
        demo.send_signal(number)
        demo.wait(STOP_TIMEOUT)
        # It may still have been loading.
        until(lambda: not any(runs(server) for server in servers), "its server has ended", timeout=50)
    finally:
        for server in servers:
            if runs(server):
                server.kill()


def test_page_and_question_do_not_go_together() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...]
    cases = (({"web": True, "prompt": "a"}, "--prompt"), ({"no_open": True}, "--web"))
    for options, match in cases:
        with pytest.raises(BadInput, match=match):
            demo(**options)


def test_a_browser_opens_only_beside_the_terminal() -> None:
    assert has_screen("linux", {"WAYLAND_DISPLAY": "wayland-0"})
    assert not has_screen("linux", {})
    assert has_screen("darwin", {})
    assert not has_screen("darwin", {"SSH_CONNECTION": "192.0.2.1 1 192.0.2.2 22"})


async def test_page_takes_another_port_only_unasked() -> None:
    output = Output(True)
    taken = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = taken[0].socket.getsockname()[1]
    with pytest.raises(MachineError, match=f"--http-port {port}"):
        await _page(WebOptions(port, opens=False), output)
    with patch.object(ApiOptions, "http_port", port):  # the usual one
        _, listeners = await _page(WebOptions(None, opens=False), output)
    assert listeners[0].socket.getsockname()[1] != port
    for listener in (*taken, *listeners):
        await listener.aclose()
