"""Whether a server serves just now: its owner's wish, and what the owner's other programs need of the machine.

`next_state`, a pure function, decides; `watch_machine` gathers what it needs. `Pause` is what a server obeys.
"""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psutil
import trio


@dataclass(frozen=True)
class MachineUsePolicy:
    """For how long a machine is busy or idle before that counts."""

    busy_seconds: float = 10.0
    """For which other programs have to use much before the server pauses: starting one takes a moment of all
    processors."""
    idle_seconds: float = 60.0  # For which they have to use little before it goes on
    idle_share: float = 0.7  # Little is this part of the limit
    mains_seconds: float = 10.0  # For which there has to be mains before it goes on. On battery it pauses at once
    interval: float = 2.0
    person_interval: float = 10.0
    """For which what the system says of keyboard and mouse is taken: asking takes a program of its own."""
    patience: float = 5.0  # For that program to answer


MACHINE_USE: Final = MachineUsePolicy()


@dataclass(frozen=True)
class Hours:
    """Times of day by the machine's clock, in minutes since midnight: from `start` on and before `end`. Over midnight
    where that is the smaller one."""

    start: int
    end: int

    def include(self, minute: int) -> bool:
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end

    def __str__(self) -> str:
        return " and ".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.start, self.end))


@dataclass(frozen=True)
class PausePolicy:
    """When a server pauses by itself. While other programs use more than `busy_above`, a share (0 to 1) of all
    processors. Outside of `hours`. Until keyboard and mouse were not used for `away_seconds`. None for never."""

    busy_above: float | None = None
    only_on_mains: bool = False
    hours: Hours | None = None
    away_seconds: float | None = None

    @property
    def watches(self) -> bool:
        return self != PausePolicy()


@dataclass(frozen=True)
class MachineUse:
    """What other programs use of all processors (0 to 1), and whether there is mains (also without a battery). The
    minute of the day, and for how many seconds nobody has used keyboard or mouse."""

    others: float = 0.0
    on_mains: bool = True
    minute: int = 0
    untouched: float = math.inf


@dataclass(frozen=True)
class Condition:
    """Something that holds or does not, and changes only after it has been otherwise for a while.

    `otherwise_since`: in seconds of any clock; None while it is as it was.
    """

    holds: bool = False
    otherwise_since: float | None = None

    def after(self, seen: bool | None, now: float, seconds: float) -> Condition:
        """The condition once it was `seen` (None: as either) at `now`; it changes after `seconds` of that."""
        if seen is None or seen == self.holds:
            return Condition(self.holds)
        since = now if self.otherwise_since is None else self.otherwise_since
        return Condition(seen) if now - since >= seconds else Condition(self.holds, since)


@dataclass(frozen=True)
class PauseState:
    """Why a server pauses by itself, if it does."""

    busy: Condition = Condition()
    on_battery: Condition = Condition()
    out_of_hours: bool = False
    in_use: bool = False


def next_state(state: PauseState, use: MachineUse, policy: PausePolicy, now: float) -> PauseState:
    """What follows from what the machine does at `now`, in seconds of any clock."""
    busy, on_battery = Condition(), Condition()
    if policy.busy_above is not None:
        much, little = use.others > policy.busy_above, use.others < MACHINE_USE.idle_share * policy.busy_above
        seen = True if much else False if little else None
        busy = state.busy.after(seen, now, MACHINE_USE.idle_seconds if state.busy.holds else MACHINE_USE.busy_seconds)
    if policy.only_on_mains:
        seconds = MACHINE_USE.mains_seconds if state.on_battery.holds else 0.0
        on_battery = state.on_battery.after(not use.on_mains, now, seconds)
    out_of_hours = policy.hours is not None and not policy.hours.include(use.minute)
    return PauseState(busy, on_battery, out_of_hours, use.untouched < (policy.away_seconds or 0.0))


def reasons(state: PauseState, policy: PausePolicy) -> dict[str, str]:
    """Why the server pauses, for a person, by the option that says so."""
    found = {}
    if state.busy.holds and policy.busy_above is not None:
        found["busy"] = f"other programs use more than {policy.busy_above:.0%} of the processors"
    if state.on_battery.holds:
        found["battery"] = "this machine runs on battery"
    if state.out_of_hours:
        found["hours"] = f"it serves between {policy.hours} only"
    if state.in_use and policy.away_seconds is not None:
        found["person"] = f"somebody used this machine in the last {policy.away_seconds / 60:g} minutes"
    return found


class Pause:
    """Whether a server is to pause, and why. Belongs to trio's thread.

    Attributes:
        reasons: sentences for a person, by who wants it; empty while the server is to serve.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._changed = trio.Event()

    @property
    def wanted(self) -> bool:
        return bool(self.reasons)

    @property
    def reason(self) -> str:
        return ", and ".join(self.reasons.values())

    def want(self, who: str, reason: str | None) -> None:
        """From now on `who` wants the server to pause for this reason, or with None no more."""
        if reason is None:
            self.reasons.pop(who, None)
        else:
            self.reasons[who] = reason
        self._changed.set()
        self._changed = trio.Event()

    async def wait(self, wanted: bool) -> None:
        """Returns once a pause is wanted, or none is."""
        while self.wanted != wanted:
            await self._changed.wait()


class MachineMeter:
    """Tells what this machine is used for since it was last asked; `asks_for_person`: keyboard and mouse, too."""

    def __init__(self, asks_for_person: bool = False) -> None:
        self._process = psutil.Process()
        self._last = self._times()
        self._asks_for_person = asks_for_person
        self._untouched, self._asked = math.inf, -math.inf

    def _times(self) -> tuple[float, float, float]:
        """Seconds of all processors so far: in all, busy, and busy for this process."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Linux counts what guests take in the time of their processes, too.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own = self._process.cpu_times()
        return total, total - idle, own.user + own.system

    def use(self) -> MachineUse:
        now, before = self._times(), self._last
        self._last = now
        total, busy, own = (later - earlier for later, earlier in zip(now, before, strict=True))
        others = min(1.0, max(0.0, (busy - own) / total)) if total > 0 else 0.0
        clock = time.localtime()
        return MachineUse(others, on_mains(), 60 * clock.tm_hour + clock.tm_min, self._person())

    def _person(self) -> float:
        if self._asks_for_person and time.monotonic() - self._asked >= MACHINE_USE.person_interval:
            said = untouched_seconds()
            self._untouched, self._asked = 0.0 if said is None else said, time.monotonic()
        return self._untouched


def on_mains() -> bool:
    """Whether the machine has mains. One that has no battery, or does not tell, has."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is None or battery.power_plugged is not False


async def watch_machine(policy: PausePolicy, pause: Pause, measure: Callable[[], MachineUse] | None = None) -> None:
    """Wants the server to pause and to go on, as `policy` has it, until cancelled."""
    measure = measure or MachineMeter(policy.away_seconds is not None).use
    state = PauseState()
    while True:
        await trio.sleep(MACHINE_USE.interval)
        state = next_state(state, await trio.to_thread.run_sync(measure), policy, trio.current_time())
        wanted = reasons(state, policy)
        for who in ("busy", "battery", "hours", "person"):
            if (who in pause.reasons) != (who in wanted):
                pause.want(who, wanted.get(who))


# --- what the system tells of keyboard and mouse


def untouched_seconds() -> float | None:
    """Seconds since somebody used keyboard, mouse or a terminal of this machine; None where it does not tell."""
    try:
        if sys.platform == "win32":
            return _by_windows()
        if sys.platform == "darwin":
            return by_registry(_printed("ioreg", "-c", "IOHIDSystem", "-d", "4"))
        return by_logind(_printed("loginctl", "show", "-p", "IdleHint", "-p", "IdleSinceHint"), time.time())
    except (OSError, subprocess.SubprocessError):
        return None


def by_logind(text: str, now: float) -> float | None:
    """What systemd's logind says of all sessions; `now` in seconds since 1970. Without any, nobody is there."""
    said = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    since = said.get("IdleSinceHint", "")
    if said.get("IdleHint") == "no":
        return 0.0
    return max(0.0, now - int(since) / 1e6) if said.get("IdleHint") == "yes" and since.isdigit() else None


def by_registry(text: str) -> float | None:
    """What macOS's registry of devices says, in nanoseconds."""
    found = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', text)
    return None if found is None else int(found[1]) / 1e9


def _printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=MACHINE_USE.patience, check=True).stdout


class _LastInput(ctypes.Structure):
    """Windows' LASTINPUTINFO."""

    _fields_ = (("size", ctypes.c_uint), ("tick", ctypes.c_uint))


def _by_windows() -> float | None:
    windows = getattr(ctypes, "windll")  # noqa: B009  (not on this system)
    last = _LastInput(ctypes.sizeof(_LastInput), 0)
    if not windows.user32.GetLastInputInfo(ctypes.byref(last)):
        return None
    ticks = int(windows.kernel32.GetTickCount())  # milliseconds, which begin anew
    return float((ticks - last.tick) & 0xFFFFFFFF) / 1000
