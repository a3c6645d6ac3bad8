"""Who is waited for: a process that computes or writes, however long it takes, and none that does nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.patience import Patience

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only /proc tells what a process does")

SECONDS = 1.5


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def patience_lasts(patience: Patience, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if patience.is_over:
            return False
        time.sleep(0.05)
    return True


def test_a_process_that_computes_is_waited_for() -> None:
    with running("while True: pass") as process:
        assert patience_lasts(Patience(SECONDS, process.pid), 2 * SECONDS)


def test_so_is_one_whose_child_computes() -> None:
    child = "import os\nwhile os.getppid() > 1: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {child!r}])"
    with running(code) as process:
        time.sleep(0.5)
        assert patience_lasts(Patience(SECONDS, process.pid), 2 * SECONDS)


def test_and_one_that_writes() -> None:
    with running("import time; time.sleep(60)") as process:
        assert patience_lasts(Patience(SECONDS, process.pid, lambda: time.monotonic_ns()), 2 * SECONDS)


def test_a_process_that_does_nothing_is_not() -> None:
    with running("import time; time.sleep(60)") as process:
        time.sleep(0.5)  # its start is work
        assert not patience_lasts(Patience(SECONDS, process.pid), 2 * SECONDS + 2)


def test_nor_is_one_that_has_ended() -> None:
    with running("pass") as process:
        process.wait()
        assert not patience_lasts(Patience(SECONDS, process.pid), 2 * SECONDS)
