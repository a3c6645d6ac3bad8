"""How much processor time the tests take: their own, and that of all the processes that they start.

A run tells it at its end; with `--processor-time-by-file FILE` it also writes a table, the costliest file first. What
a fixture of a session or module costs counts for the test that first asks for it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.patience import children
from tests.swarm import warm_python

_TICKS = os.sysconf("SC_CLK_TCK")


def used_by(pid: int) -> float:
    """Seconds of user and system time of a process, of its descendants, and of those of them that have ended."""
    total = 0.0
    with suppress(OSError):  # it has just ended; its parent has its time
        # Fields 14 to 17 of proc(5): utime, stime, cutime, cstime. The name before them may have spaces in it.
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        total = sum(map(int, times)) / _TICKS
        total += sum(used_by(child) for child in children(pid))
    return total


def _used() -> float:
    """By this process and by all that it has started, by whichever way."""
    copies = warm_python.elsewhere()
    return used_by(os.getpid()) + sum(copy.used if copy.poll() is not None else used_by(copy.pid) for copy in copies)


class ProcessorTime:
    """The plug-in. Each test's report carries what was used since the one before it, also from a process of xdist."""

    def __init__(self) -> None:
        self._before = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if call.when == "teardown" and item.config.getoption("--processor-time-by-file"):
            used = _used()
            report.processor_time = used - self._before
            self._before = used
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        used = used_by(os.getpid())
        terminalreporter.write_line(
            f"processor time: {used // 60:.0f} min {used % 60:.0f} s, user and system, all processes"
        )
        table = config.getoption("--processor-time-by-file")
        if table:
            self._write_table(Path(table), terminalreporter)

    def _write_table(self, path: Path, reporter: pytest.TerminalReporter) -> None:
        by_file: Counter[str] = Counter()
        by_test: Counter[str] = Counter()
        for reports in reporter.stats.values():
            for report in reports:
                if getattr(report, "processor_time", None) is not None:
                    by_file[report.nodeid.partition("::")[0]] += report.processor_time
                    by_test[report.nodeid] += report.processor_time
        lines = [f"{used:8.2f} {name}" for table in (by_file, by_test) for name, used in table.most_common()]
        path.write_text("\n".join(lines) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-time-by-file", metavar="FILE", help="write a table of processor time used")


def pytest_configure(config: pytest.Config) -> None:
    if Path("/proc/self/task").is_dir():  # Linux
        config.pluginmanager.register(ProcessorTime())
