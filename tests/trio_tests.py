"""Runs tests that are `async def` in trio: in virtual time where the marker `virtual_time` says so, by `mock_clock`
where they ask for it, and where they ask for the `swarm` in memory, its `pool` or its `raw_node`, in the loop of that.
In virtual time no processor time passes: a node counts it for its peers, and would refuse more on a slow machine.
Of a test of Hypothesis, each example runs so."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock

from petalnode.node.testing import run_autojumping

_LONGEST: Final = 86400.0  # seconds of virtual time: what waits for ever fails at once


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "virtual_time: trio's clock jumps to the next deadline when all tasks wait")


@pytest.fixture
def mock_clock() -> MockClock:
    """Time passes only when the test says so."""
    return MockClock()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    virtual = pyfuncitem.get_closest_marker("virtual_time") is not None
    if virtual:
        pyfuncitem._request.getfixturevalue("monkeypatch").setattr(time, "thread_time", float)
    examples = getattr(pyfuncitem.obj, "hypothesis", None)
    if examples is not None and inspect.iscoroutinefunction(examples.inner_test):
        test = examples.inner_test
        examples.inner_test = lambda **given: _run(test, given, virtual)
        return None
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    if "mock_clock" in pyfuncitem.funcargs:
        trio.run(partial(pyfuncitem.obj, **fixtures), clock=pyfuncitem.funcargs["mock_clock"])
    elif "raw_node" in fixtures:
        pyfuncitem._request.getfixturevalue("run")(lambda _: pyfuncitem.obj(**fixtures))
    elif "swarm" in fixtures or "pool" in fixtures:
        swarm = fixtures["swarm"] if "swarm" in fixtures else fixtures["pool"].swarm
        swarm.call(partial(pyfuncitem.obj, **fixtures))
    else:
        _run(pyfuncitem.obj, fixtures, virtual)
    return True


def _run(test: Callable[..., Awaitable[object]], given: dict[str, Any], virtual: bool) -> None:
    async def bounded() -> None:
        with trio.fail_after(_LONGEST if virtual else float("inf")):
            await test(**given)

    (run_autojumping if virtual else trio.run)(bounded)
