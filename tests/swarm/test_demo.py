"""`petalnode demo` on the real default model: the answer, and nothing left behind however it ends.

Its servers start the usual way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from petalnode.node.errors import ModelError
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
    outcome = petalnode(
        *("demo", "--servers", "3", "--prompt", "What is the capital of France?", "--json", "--max-new-tokens", "40"),
        env=env,
        timeout=380,
    )
    assert outcome.code == 0, outcome
    (answer,) = outcome.objects
    assert "Paris" in answer["text"], answer
    assert [hop["blocks"] for hop in answer["route"]] == [[0, 10], [10, 20], [20, 30]]
    assert len({hop["peer_id"] for hop in answer["route"]}) == 3
    assert "Traceback" not in outcome.err, outcome


ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.fixture(scope="module")
def demos(env: dict[str, str]) -> Iterator[dict[signal.Signals, warm_python.Process]]:
    """A demo for each way to end it, started side by side; with a terminal, so that it waits for questions."""
    command = [sys.executable, "-m", "petalnode", "demo", "--servers", "1"]
    ours, theirs = os.openpty()
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = {number: warm_python.start(command, env, stdin=theirs, **silent) for number in ENDS}
    try:
        yield started
    finally:
        for demo in started.values():
            demo.kill()
            demo.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("number", ENDS)
def test_no_server_outlives_the_demo(number: signal.Signals, demos: dict[signal.Signals, warm_python.Process]) -> None:
    demo = demos[number]
    until(lambda: demo.poll() is not None or bool(servers_of(demo.pid)), "the server starts", timeout=100)
    assert demo.poll() is None
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
