"""`python -m tests.fuzz`: feeds all targets with mutated inputs, and tells what was found."""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import random
import signal
import sys
import warnings
from types import FrameType

from tests.fuzz.harness import Failure, Report, Target, grown, run
from tests.fuzz.targets import all_targets

_SLOW = 2.0
"""Seconds of processor time that no input may take."""
_STUCK = 30.0
_KEPT = 4096
"""Bytes that an input may leave behind: a table that is bounded grows for a while."""
_SHOWN = 5
"""Failures of one target that are told in full."""


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--inputs", type=int, default=1_000_000, help="of all targets together")
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options.add_argument("--memory", type=int, default=40, help="inputs of each target whose memory is watched")
    options.add_argument("--target", help="only those whose name has this in it")
    options.add_argument("--number", type=int, help="only this input, to see a failure again")
    given = options.parse_args()
    targets = [target for target in all_targets() if not given.target or given.target in target.name]
    if given.number is not None:
        reports = [run(target, given.seed, [given.number]) for target in targets]
        return _tell_failures(reports)
    print(f"seed {given.seed}, {given.inputs:,} inputs", flush=True)
    print(f"{'target':32} {'inputs':>9} {'seconds':>8} {'slowest':>8} {'failures':>8}", flush=True)
    shares = sum(target.share for target in targets)
    reports = []
    for target in targets:
        count = max(1, math.ceil(given.inputs * target.share / shares))
        report = run(target, given.seed, range(count), _watched)
        if report.slowest > _SLOW:
            what = f"took {report.slowest:.1f} s of processor time"
            report.failures.append(Failure(target.name, report.slowest_number, what))
        report.failures += _memory(target, given.seed, given.memory)
        reports.append(report)
        told = f"{report.inputs:9,} {report.seconds:8.1f} {report.slowest:7.3f}s {len(report.failures):8}"
        print(f"{target.name:32} {told}", flush=True)
        _tell_failures([report])
    inputs, failures = sum(report.inputs for report in reports), sum(len(report.failures) for report in reports)
    print(f"{'all':32} {inputs:9,} {sum(report.seconds for report in reports):8.1f} {'':8} {failures:8}")
    return 1 if failures else 0


def _memory(target: Target, seed: int, inputs: int) -> list[Failure]:
    if not inputs:
        return []
    kept, above, number = grown(target, seed, inputs)
    failures = []
    if kept > _KEPT * inputs:
        failures.append(Failure(target.name, 0, f"{kept / inputs:,.0f} bytes of an input are kept"))
    if above > 0:
        failures.append(Failure(target.name, number, f"took {above:,} bytes more than it may"))
    return failures


def _watched(target: Target, number: int) -> None:
    """Ends the process if this input keeps the processor busy for far too long."""

    def stuck(signal_number: int, frame: FrameType | None) -> None:
        print(f"{target.name}, input {number}: still at work after {_STUCK:g} s", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
        os._exit(1)

    signal.signal(signal.SIGVTALRM, stuck)
    signal.setitimer(signal.ITIMER_VIRTUAL, _STUCK)


def _tell_failures(reports: list[Report]) -> int:
    for report in reports:
        kinds: dict[str, list[Failure]] = {}
        for failure in report.failures:
            kinds.setdefault(failure.what.strip().rpartition("\n")[2][:40], []).append(failure)
        for failures in list(kinds.values())[:_SHOWN]:
            print(f"  {failures[0].target}, input {failures[0].number} ({len(failures)} like it):")
            print("    " + failures[0].what.strip()[-1200:].replace("\n", "\n    "), flush=True)
    return 1 if any(report.failures for report in reports) else 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
