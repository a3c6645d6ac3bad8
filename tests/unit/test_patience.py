"""Who is waited for: a process that computes or writes, however long it takes, and none that does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests import patience
from tests.patience import Patience, worked

SECONDS = 1.5


@dataclass
class Process:
    """What a process has done by now, in a time that only the test moves."""

    now: float = 0.0
    worked: float = 0.0
    written: int = 0


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()
    monkeypatch.setattr(patience, "monotonic", lambda: process.now)
    monkeypatch.setattr(patience, "worked", lambda pid: process.worked)
    return process


def patience_lasts(process: Process, then: Callable[[float], None], seconds: float = 2 * SECONDS) -> bool:
    """Whether it is not over within the seconds in which `then` happens every 0.05 s."""
    patience = Patience(SECONDS, 0, lambda: process.written)
    while process.now < seconds:
        process.now += 0.05
        then(0.05)
        if patience.is_over:
            return False
    return True


def test_a_process_that_computes_is_waited_for(process: Process) -> None:
    def compute(seconds: float) -> None:
        process.worked += 0.2 * seconds

    assert patience_lasts(process, compute, 60 * SECONDS)


def test_and_one_that_writes(process: Process) -> None:
    def write(seconds: float) -> None:
        process.written += 1

    assert patience_lasts(process, write, 60 * SECONDS)


def test_process_that_does_next_to_nothing_is_not(process: Process) -> None:
    def idle(seconds: float) -> None:
        process.worked += 0.01 * seconds

    assert not patience_lasts(process, idle)
    assert SECONDS <= process.now < SECONDS + 0.1


def test_its_last_work_counts_for_so_many_seconds(process: Process) -> None:
    def start(seconds: float) -> None:
        process.worked += seconds * (process.now < 1)

    assert not patience_lasts(process, start, 4 * SECONDS)
    assert 1 + SECONDS <= process.now < 1 + SECONDS + 2 * 0.05


# --- what a process has done


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only /proc tells what a process does")


@LINUX
def test_what_a_process_computes_grows() -> None:
    with running("while True: pass") as process:
        while worked(process.pid) < 0.2:
            time.sleep(0.02)


@LINUX
def test_what_its_child_computes_counts() -> None:
    child = "import os\nwhile os.getppid() > 1: pass"
    code = (
        f"import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-c', {child!r}]); time.sleep(60)"
    )
    with running(code) as process:
        while worked(process.pid) < 0.5:  # more than it needs itself
            time.sleep(0.02)


@LINUX
def test_one_that_has_ended_does_nothing_more() -> None:
    with running("pass") as process:
        process.wait()
        assert worked(process.pid) == worked(process.pid) == 0.0
    assert worked(os.getpid()) > 0
