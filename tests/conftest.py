from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings

from tests.swarm import lasting_nodes, warm_python

if TYPE_CHECKING:
    from petalnode.node.blocks.kernels.library import Library

# How fast this machine happens to be is no property of the code, and every run tries the same examples: a failure by
# others would have nothing to do with the change that it stops. `--hypothesis-profile random` looks for such.
_ANY_MACHINE = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", _ANY_MACHINE)
settings.register_profile("petalnode", _ANY_MACHINE, derandomize=True)
settings.load_profile("petalnode")

pytest_plugins = ["tests.processor_time", "tests.slowness", "tests.trio_tests"]

# Before torch is imported. Of tiny models, threads of torch mostly wait for each other, on cores that other tests want.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts us in the background has Ctrl-C ignored, nohup SIGHUP, by us and all processes that we start.
for ignored, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, handler)


@pytest.fixture(autouse=True)
def levels_of_loggers() -> Iterator[None]:
    """A command that a test runs in this process sets them for all of it, as `--log-level` has it."""
    loggers = [logging.getLogger(name) for name in ("petalnode", "libp2p")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is kept of models between runs, in a folder of the test."""
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, no server is left because it is slow."""
    from petalnode.node.client import deadlines

    endless = replace(deadlines.PATIENCE, least=1e6, first_least=1e6, first_most=1e6)
    monkeypatch.setattr(deadlines, "PATIENCE", endless)


@pytest.fixture
def dials_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, no server is taken for one that is not there because it answers late at first."""
    from petalnode.node.client import round_trips
    from petalnode.node.network.transport import connections

    monkeypatch.setattr(connections, "DIALING", replace(connections.DIALING, directly=120.0, by_circuit=120.0))
    monkeypatch.setattr(round_trips, "DEADLINES", replace(round_trips.DEADLINES, rtt=120.0, measure=120.0))


@pytest.fixture
def pushes_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, no step that a server should have pushed is sent by the client."""
    from petalnode.node.client import deadlines

    monkeypatch.setattr(deadlines, "DEADLINES", replace(deadlines.DEADLINES, push_patience=1e6))


@pytest.fixture
def briefly_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers keep sessions whose stream was lost for half a second: so long a client waits for one that is gone."""
    from petalnode.node.client.session import link, stream

    for module in (link, stream):
        monkeypatch.setattr(module, "DEADLINES", replace(module.DEADLINES, path_keep=0.5, keep_grace=0.5))


@pytest.fixture(scope="module")
def blocks_as_served() -> Iterator[None]:
    """Servers in memory compute as those of `petalnode serve` do: a step of a tiny model takes a tenth of the time."""
    from petalnode.node.testing import memory_servers

    with patch.dict(memory_servers.USUAL, kernels="auto"):
        yield


@pytest.fixture
def kernels() -> Iterator[Library]:
    """The compiled kernels, of which a test may select others."""
    from petalnode.node.blocks.kernels.library import library

    found = library()
    if found is None:
        pytest.skip("the kernels are not built (make setup, with a C compiler)")
    yield found
    found.select(found.isa)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """The workers of xdist are copies as well: what takes seconds to import is imported once."""
    for spec in specs:
        if sys.platform == "linux" and spec.popen and not spec.python:
            spec.python = warm_python.worker_command()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes of xdist have theirs copied from one."""
    node.workerinput["warm_python"] = str(warm_python.template())


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        warm_python.share(Path(config.workerinput["warm_python"]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """All tests stay to the end: no garbage collection looks through them, neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the files into the order in which xdist hands them out.

    First those that use nodes of several files, which end then. Then those that start processes, then tests/unit, whose
    short files fill what is left. Those with NATs come one by one between the others: each has several machines' worth
    of processes, and deadlines of a network to keep.
    """
    by_folder: dict[str, list[list[pytest.Item]]] = {"nat": [], "parity": [], "swarm": [], "unit": []}
    lasting: list[list[pytest.Item]] = []
    for path, group in groupby(items, key=lambda item: item.path):
        file = list(group)
        users = any(lasting_nodes.FIXTURE in getattr(item, "fixturenames", ()) for item in file)
        (lasting if users else by_folder.setdefault(_folder(path), [])).append(file)
    config.stash[lasting_nodes.FILES] = {file[0].path for file in lasting}
    unit = by_folder.pop("unit")
    first = [(number / len(files), file) for files in by_folder.values() for number, file in enumerate(files)]
    first.sort(key=lambda placed: placed[0])
    items[:] = [item for file in [*lasting, *(file for _, file in first), *unit] for item in file]


def _folder(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).parts[0]
