"""How the owner of a running server pauses and stops it: options, signals, and `petalnode pause`, `stop`.

`petalnode pause` and the server speak through two small files in the data folder, which only its owner can write: the
server says in one that it runs and how it stands. Once a second it looks into the other for what is asked of it. That
works on every system, and opens no port.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal, get_args

import psutil
import trio

from ...crypto.identity import make_private_folder, write_private
from ..errors import BadInput, MachineError
from ..models.cache_dir import began_at, data_folder, still_runs
from ..server.lifecycle.pausing import Hours, Pause, PausePolicy, untouched_seconds, watch_machine
from .option import option
from .output import Output

Wish = Literal["pause", "resume", "stop"]
USUAL_SHARE: Final = "50%"
USUAL_MINUTES: Final = "10"
_OWNER: Final = "its owner has paused it"


@dataclass(frozen=True)
class ControlTimes:
    """How wishes for a server are left and read."""

    look: float = 1.0
    most_bytes: int = 4096
    patience: float = 30.0
    """Seconds for a server to hear what is asked; it looks once a second, unless the machine is very busy."""
    answer_look: float = 0.1


CONTROL: Final = ControlTimes()
_SIGNALS: Final[dict[str, Wish]] = {"SIGUSR1": "pause", "SIGUSR2": "resume"}


@dataclass(frozen=True)
class DonorOptions:
    """When a server leaves the machine to its owner."""

    pause_when_busy: str | None = option(
        None,
        f"Pause while other programs use more than P percent of the processors ({USUAL_SHARE} unless given).",
        "[P%]",
    )
    only_on_mains: bool = option(False, "Pause while this machine runs on battery.")

    between: str | None = option(None, "Serve only between these times, over midnight too.", "HH:MM-HH:MM")
    when_away: str | None = option(
        None,
        f"Serve only when keyboard and mouse were not used for so long ({USUAL_MINUTES} unless given).",
        "[MINUTES]",
    )

    def policy(self) -> PausePolicy:
        """
        Raises:
            BadInput: a value that is no share, no times of day, or no minutes.
            MachineError: this system does not tell when somebody used keyboard or mouse.
        """
        busy = away = None
        if self.pause_when_busy is not None:
            what = f"percent of all processors, such as {USUAL_SHARE}"
            busy = number_given("--pause-when-busy", self.pause_when_busy, 1, 100, what) / 100
        if self.when_away is not None:
            what = f"minutes, from 1 to 1440, such as {USUAL_MINUTES}"
            away = 60 * number_given("--when-away", self.when_away, 1, 24 * 60, what)
        if away is not None and untouched_seconds() is None:
            raise MachineError(
                "--when-away: this system does not tell when keyboard and mouse were last used (on Linux, "
                "systemd-logind does); take --between or --pause-when-busy"
            )
        return PausePolicy(busy, self.only_on_mains, _hours(self.between), away)


def number_given(option: str, text: str, low: float, high: float, what: str) -> float:
    """The number that an option has, with or without a percent sign.

    Raises:
        BadInput: it is none from `low` to `high`, which is `what`.
    """
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise BadInput(f"{option} {text}: give {what}")
    return value


def _hours(text: str | None) -> Hours | None:
    if text is None:
        return None
    try:
        start, end = (time.strptime(part.strip(), "%H:%M") for part in text.split("-"))
    except ValueError:
        start = end = time.gmtime(0)
    if start[:5] == end[:5]:
        raise BadInput(f"--between {text}: give two times of day, such as 22:00-07:00")
    return Hours(60 * start.tm_hour + start.tm_min, 60 * end.tm_hour + end.tm_min)


@dataclass(frozen=True)
class RunningServer:
    """What a server says of itself in its file. `answered` is the id of the last wish that it has heard, `address` a
    multiaddr of it; empty if it has none, or its swarm is a private one."""

    pid: int
    started: float
    peer_id: str
    name: str
    state: str = "serving"
    reason: str = ""
    answered: str = ""
    address: str = ""

    @property
    def title(self) -> str:
        return self.name or f"…{self.peer_id[-8:]}"

    def is_called(self, given: str) -> bool:
        end = given.removeprefix("…")
        return given in (self.name, str(self.pid)) or (bool(end) and self.peer_id.endswith(end))


def control_folder() -> Path:
    return data_folder() / "control"


def running_servers(folder: Path) -> list[RunningServer]:
    """The servers that run. The files of those that are gone are removed."""
    found = []
    with suppress(OSError):
        for file in sorted(folder.glob("*.json")):
            with suppress(OSError, ValueError, TypeError, RecursionError):
                said = RunningServer(**json.loads(_read(file)))
                if _runs(said):
                    found.append(said)
                else:
                    file.unlink()
    return found


def own_addresses() -> tuple[str, ...]:
    """Where the servers that run on this machine are found."""
    return tuple(server.address for server in running_servers(control_folder()) if server.address)


def _runs(said: RunningServer) -> bool:
    try:
        return still_runs(said.pid, said.started)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def ask(folder: Path, server: RunningServer, wish: Wish) -> str:
    """Leaves a wish for a server; returns its id, which the server repeats when it has heard it.

    Raises:
        OSError: it cannot be written.
    """
    name = secrets.token_hex(8)
    _write(folder / f"{server.pid}.wish", {"id": name, "wish": wish})
    return name


def send_wish(given: str | None, wish: Wish, output: Output) -> None:
    """Leaves the wish for all servers that run, or those that are called `given`, and says what they answer.

    Raises:
        MachineError: no server runs, or one does not answer.
        BadInput: none is called so.
    """
    folder = control_folder()
    running = running_servers(folder)
    if not running:
        raise MachineError("no server of yours runs on this machine: `petalnode serve` starts one")
    chosen = running if given is None else [server for server in running if server.is_called(given)]
    if not chosen:
        names = ", ".join(f"{server.title} (process {server.pid})" for server in running)
        raise BadInput(f"no server is called {given}: those that run are {names}")
    asked = {server.pid: ask(folder, server, wish) for server in chosen}
    for server in chosen:
        now = _answer(folder, server, asked[server.pid], wish)
        output.say(f"{now.title}: {_told(now, wish)}")
        state = "paused" if now.state == "paused" and now.reason else "pausing" if now.reason else "serving"
        state = "stopping" if wish == "stop" else state
        output.emit(peer_id=now.peer_id, name=now.name, pid=now.pid, state=state, reason=now.reason)


def _told(server: RunningServer, wish: Wish) -> str:
    if wish == "stop":
        return "ends when its sessions have moved or ended"
    if wish == "pause":
        return "paused" if server.state == "paused" else "pauses when its sessions have moved or ended"
    return f"still paused: {server.reason}" if server.reason else "serves again"


def _answer(folder: Path, server: RunningServer, name: str, wish: Wish) -> RunningServer:
    """What the server says once it has heard the wish.

    Raises:
        MachineError: it has ended, or does not answer.
    """
    deadline = time.monotonic() + CONTROL.patience
    while time.monotonic() < deadline:
        found = next((other for other in running_servers(folder) if other.pid == server.pid), None)
        if found is None and wish == "stop":
            return server
        if found is None:
            raise MachineError(f"the server {server.title} has ended")
        if found.answered == name:
            return found
        time.sleep(CONTROL.answer_look)
    raise MachineError(f"the server {server.title} (process {server.pid}) does not answer")


# --- the files


def _read(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(CONTROL.most_bytes)


def _write(file: Path, content: object) -> None:
    write_private(file, json.dumps(content).encode())


class Control:
    """The server's end: obeys wishes, and says how it stands. Without a folder to write into, there are no wishes."""

    def __init__(self, folder: Path, pause: Pause, peer_id: str, name: str) -> None:
        self._folder = folder
        self._pause = pause
        pid = os.getpid()
        self._said = RunningServer(pid, began_at(pid), peer_id, name)
        self._changed = trio.Event()
        self._wish = folder / f"{pid}.wish"
        self._file = folder / f"{pid}.json"

    def found_at(self, address: str) -> None:
        """Commands of the same person on this machine find the swarm by this address."""
        self._said = replace(self._said, address=address)

    def tell(self, state: str) -> None:
        """Says how the server stands: serving, pausing or paused."""
        self._said = replace(self._said, state=state)
        self._changed.set()

    async def run(self) -> None:
        """Looks for wishes once a second, until cancelled."""
        written: RunningServer | None = None
        try:
            with suppress(OSError):
                await trio.to_thread.run_sync(make_private_folder, self._folder)
            while True:
                self._changed = trio.Event()
                heard = await trio.to_thread.run_sync(self._next_wish)
                if heard is not None:
                    if heard[1] != "stop":
                        obey(self._pause, heard[1])
                    self._said = replace(self._said, answered=heard[0])
                self._said = replace(self._said, reason=self._pause.reason)
                if self._said != written:
                    written = self._said
                    with suppress(OSError):
                        await trio.to_thread.run_sync(_write, self._file, asdict(written))
                if heard is not None and heard[1] == "stop":
                    signal.raise_signal(signal.SIGTERM)  # as a service manager has it
                with trio.move_on_after(CONTROL.look):
                    await self._changed.wait()
        finally:
            for file in (self._file, self._wish):
                with suppress(OSError):
                    file.unlink()

    def _next_wish(self) -> tuple[str, Wish] | None:
        try:
            data = _read(self._wish)
            self._wish.unlink()
            said = json.loads(data)
            name, wish = said["id"], said["wish"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return (str(name)[:64], wish) if wish in get_args(Wish) else None


def obey(pause: Pause, wish: Wish) -> None:
    pause.want("owner", _OWNER if wish == "pause" else None)


async def obey_signals(pause: Pause, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """SIGUSR1 pauses and SIGUSR2 resumes, on systems that have such signals."""
    found = {getattr(signal, name, None): wish for name, wish in _SIGNALS.items()}
    wishes = {number: wish for number, wish in found.items() if number is not None}
    if not wishes:
        task_status.started()
        return
    with trio.open_signal_receiver(*wishes) as received:
        task_status.started()
        async for number in received:
            obey(pause, wishes[signal.Signals(number)])


@asynccontextmanager
async def controlled(pause: Pause, policy: PausePolicy, peer_id: str, name: str) -> AsyncIterator[Control]:
    """For the length of the block, the owner and the machine's other programs pause the server."""
    control = Control(control_folder(), pause, peer_id, name)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(control.run)
        if policy.watches:
            nursery.start_soon(watch_machine, policy, pause)
        yield control
        nursery.cancel_scope.cancel()
