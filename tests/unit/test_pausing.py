"""When a server pauses by itself, and how its owner pauses it."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from petalnode.node.cli import control
from petalnode.node.cli.control import Control, DonorOptions, RunningServer, ask, obey_signals, running_servers
from petalnode.node.cli.output import Output
from petalnode.node.errors import BadInput, MachineError
from petalnode.node.models.cache_dir import began_at
from petalnode.node.server.lifecycle import pausing
from petalnode.node.server.lifecycle.pausing import (
    MACHINE_USE,
    Condition,
    Hours,
    MachineMeter,
    MachineUse,
    Pause,
    PausePolicy,
    PauseState,
    by_logind,
    by_registry,
    next_state,
    on_mains,
    reasons,
    watch_machine,
)

BUSY = PausePolicy(busy_above=0.5)
MAINS = PausePolicy(only_on_mains=True)


def after(policy: PausePolicy, uses: list[tuple[float, MachineUse]], state: PauseState | None = None) -> list[str]:
    """Why a server is paused in the end, when the machine was used like this, each for some seconds, a look each."""
    state, now = state or PauseState(), 0.0
    for seconds, use in uses:
        for _ in range(round(seconds)):
            state, now = next_state(state, use, policy, now), now + 1
    return sorted(reasons(state, policy))


@pytest.mark.parametrize(
    ("uses", "paused"),
    [
        ([(MACHINE_USE.busy_seconds, 0.9)], False),  # not for long enough
        ([(MACHINE_USE.busy_seconds + 1, 0.9)], True),
        (
            [(MACHINE_USE.busy_seconds - 1, 0.9), (1, 0.1), (MACHINE_USE.busy_seconds - 1, 0.9)],
            False,
        ),  # a pause in between begins anew
        ([(1000, 0.5)], False),  # not more than the limit
        ([(1000, 0.9), (1000, 0.4)], True),  # less than the limit, and not little
        ([(1000, 0.9), (MACHINE_USE.idle_seconds, 0.1)], True),
        ([(1000, 0.9), (MACHINE_USE.idle_seconds + 1, 0.1)], False),
        ([(1000, 0.9), (MACHINE_USE.idle_seconds - 1, 0.1), (1, 0.4), (MACHINE_USE.idle_seconds - 1, 0.1)], True),
    ],
)
def test_other_programs_go_first(uses: list[tuple[float, float]], paused: bool) -> None:
    given = [(seconds, MachineUse(others)) for seconds, others in uses]
    assert after(BUSY, given) == (["busy"] if paused else [])
    assert after(MAINS, given) == []


def test_a_load_around_the_limit_changes_nothing_twice() -> None:
    state, changes = PauseState(), 0
    for second in range(10_000):
        now = next_state(state, MachineUse(0.75 if second // 20 % 2 else 0.4), BUSY, float(second))
        changes += now.busy.holds != state.busy.holds
        state = now
    assert changes == 1


def test_battery_pauses_at_once_until_mains_stay() -> None:
    battery, mains = MachineUse(on_mains=False), MachineUse()
    assert after(MAINS, [(1, battery)]) == ["battery"]
    assert after(MAINS, [(1, battery), (MACHINE_USE.mains_seconds, mains)]) == ["battery"]
    assert after(MAINS, [(1, battery), (MACHINE_USE.mains_seconds + 1, mains)]) == []
    assert (
        after(
            MAINS,
            [
                (1, battery),
                (MACHINE_USE.mains_seconds - 1, mains),
                (1, battery),
                (MACHINE_USE.mains_seconds - 1, mains),
            ],
        )
        != []
    )
    assert after(BUSY, [(100, battery)]) == []
    both = PausePolicy(0.5, True)
    assert after(both, [(100, MachineUse(0.9, False))]) == ["battery", "busy"]


def test_undecided_state_starts_the_time_anew() -> None:
    begun = Condition().after(True, 10.0, 5.0)
    assert begun == Condition(False, 10.0)
    assert begun.after(True, 14.0, 5.0) == begun and begun.after(True, 15.0, 5.0) == Condition(True)
    assert begun.after(None, 14.0, 5.0) == Condition(False)


@pytest.mark.virtual_time
async def test_machine_is_watched_while_it_serves() -> None:
    use = MachineUse()
    pause = Pause()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_machine, PausePolicy(0.5, True), pause, lambda: use)
        await trio.sleep(100)
        assert not pause.wanted
        use = MachineUse(0.8)
        await pause.wait(True)
        assert pause.reason == "other programs use more than 50% of the processors"
        use = MachineUse(0.8, on_mains=False)
        await trio.sleep(100)
        assert "battery" in pause.reason and "50%" in pause.reason
        begun, use = trio.current_time(), MachineUse()
        await pause.wait(False)
        assert MACHINE_USE.idle_seconds <= trio.current_time() - begun < 2 * MACHINE_USE.idle_seconds
        nursery.cancel_scope.cancel()


def test_the_meter_leaves_out_what_this_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    times: dict[str, Any] = {"user": 10.0, "system": 5.0, "idle": 100.0, "iowait": 20.0, "guest": 3.0}
    kind = type("Times", (tuple,), {name: property(lambda self, name=name: times[name]) for name in times})
    own = [1.0]
    monkeypatch.setattr(psutil, "cpu_times", lambda: kind(times.values()))
    monkeypatch.setattr(
        psutil.Process, "cpu_times", lambda self: type("Own", (), {"user": own[0], "system": 0.0}), raising=True
    )
    meter = MachineMeter()
    times.update(user=16.0, idle=110.0, iowait=24.0)  # 20 s, of which 6 were busy
    own[0] = 3.0
    assert meter.use().others == pytest.approx(0.2)
    assert meter.use().others == 0.0  # no time has passed


@pytest.mark.parametrize(("plugged", "mains"), [(True, True), (False, False), (None, True), ("none", True)])
def test_a_machine_without_a_battery_has_mains(plugged: Any, mains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    battery = None if plugged == "none" else type("Battery", (), {"power_plugged": plugged})
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert on_mains() is mains


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        (Hours(22 * 60, 7 * 60), (22 * 60, 24 * 60 - 1, 0, 7 * 60 - 1), (7 * 60, 12 * 60, 22 * 60 - 1)),
        (Hours(9 * 60, 17 * 60), (9 * 60, 17 * 60 - 1), (0, 9 * 60 - 1, 17 * 60, 24 * 60 - 1)),
    ],
)
def test_it_serves_within_its_hours(hours: Hours, inside: tuple[int, ...], outside: tuple[int, ...]) -> None:
    policy = PausePolicy(hours=hours)
    for minute in inside:
        assert after(policy, [(1, MachineUse(minute=minute))]) == []
    for minute in outside:
        assert after(policy, [(1, MachineUse(minute=minute))]) == ["hours"]
    assert reasons(PauseState(out_of_hours=True), PausePolicy(hours=Hours(22 * 60, 7 * 60 + 5))) == {
        "hours": "it serves between 22:00 and 07:05 only"
    }


def test_it_serves_when_nobody_is_there() -> None:
    policy = PausePolicy(away_seconds=600)
    assert after(policy, [(1, MachineUse(untouched=599))]) == ["person"]
    assert after(policy, [(1, MachineUse(untouched=0)), (1, MachineUse(untouched=600))]) == []
    assert after(PausePolicy(0.5), [(1, MachineUse(untouched=0))]) == []


def test_what_systems_say_of_keyboard_and_mouse() -> None:
    assert by_logind("IdleHint=no\nIdleSinceHint=5\n", 100.0) == 0
    assert by_logind("IdleHint=yes\nIdleSinceHint=40000000\n", 100.0) == 60
    assert by_logind("IdleHint=yes\nIdleSinceHint=\n", 100.0) is None and by_logind("", 100.0) is None
    assert by_registry('  | "HIDIdleTime" = 2500000000\n') == 2.5 and by_registry("") is None


def test_meter_asks_for_person_only_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def untouched() -> None:
        asked.append(1)

    monkeypatch.setattr(pausing, "untouched_seconds", untouched)
    assert MachineMeter().use().untouched == math.inf and not asked
    meter = MachineMeter(asks_for_person=True)
    assert [meter.use().untouched for _ in range(3)] == [0, 0, 0] and len(asked) == 1  # what it does not tell is use


@pytest.mark.parametrize("text", ["22-7", "22:00", "25:00-07:00", "07:00-07:00", "22:00-07:00-08:00", ""])
def test_hours_that_are_none_are_told(text: str) -> None:
    with pytest.raises(BadInput, match="such as 22:00-07:00"):
        DonorOptions(between=text).policy()
    assert DonorOptions(between="22:00-07:30").policy() == PausePolicy(hours=Hours(22 * 60, 7 * 60 + 30))


def test_no_minutes_and_an_untelling_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "soon", "-3", "nan", "1e9"):
        with pytest.raises(BadInput, match="--when-away"):
            DonorOptions(when_away=text).policy()
    monkeypatch.setattr(control, "untouched_seconds", lambda: 3.0)
    assert DonorOptions(when_away="15").policy() == PausePolicy(away_seconds=900)
    monkeypatch.setattr(control, "untouched_seconds", lambda: None)
    with pytest.raises(MachineError, match="--between"):
        DonorOptions(when_away="15").policy()


@pytest.mark.parametrize("text", ["0%", "101", "often", "-5%", "nan"])
def test_a_share_that_is_none_is_told(text: str) -> None:
    with pytest.raises(BadInput, match="--pause-when-busy"):
        DonorOptions(pause_when_busy=text).policy()
    assert DonorOptions(pause_when_busy="75%").policy() == PausePolicy(0.75)
    assert not DonorOptions().policy().watches


# --- the owner


@pytest.mark.virtual_time
async def test_wish_reaches_server_and_its_answer_owner(tmp_path: Path) -> None:
    pause, folder = Pause(), tmp_path / "control"
    served = Control(folder, pause, "12D3KooWpeer", "attic")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.run)
        await trio.sleep(5)
        [server] = running_servers(folder)
        assert (server.pid, server.title, server.state) == (os.getpid(), "attic", "serving")
        name = ask(folder, server, "pause")
        await pause.wait(True)
        await trio.sleep(5)
        [server] = running_servers(folder)
        assert server.answered == name and server.reason == "its owner has paused it"
        served.tell("paused")
        await trio.sleep(5)
        assert running_servers(folder)[0].state == "paused"
        pause.want("busy", "other programs use much")
        name = ask(folder, server, "resume")
        await trio.sleep(5)
        [server] = running_servers(folder)
        assert (server.answered, server.reason) == (name, "other programs use much")
        assert control._told(server, "resume") == "still paused: other programs use much"
        nursery.cancel_scope.cancel()
    assert list(folder.iterdir()) == []
    assert not folder.stat().st_mode & 0o077 or os.name != "posix"


@pytest.mark.virtual_time
@pytest.mark.parametrize("content", ["", "[]", '{"id": 1}', '{"id": "x", "wish": "end"}', "x" * 100_000, "[" * 5000])
async def test_what_is_no_wish_is_ignored(content: str, tmp_path: Path) -> None:
    pause = Pause()
    served = Control(tmp_path, pause, "12D3KooWpeer", "")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.run)
        (tmp_path / f"{os.getpid()}.wish").write_text(content)
        await trio.sleep(5)
        assert not pause.wanted
        ask(tmp_path, running_servers(tmp_path)[0], "pause")
        await pause.wait(True)
        nursery.cancel_scope.cancel()


@pytest.mark.virtual_time
async def test_a_server_serves_where_nothing_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Control(file / "control", Pause(), "12D3KooWpeer", "").run)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()


def test_servers_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    here = RunningServer(os.getpid(), began_at(os.getpid()), "12D3KooWpeer", "")
    for name, said in {"here": here, "before": replace(here, started=here.started - 100)}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(vars(said)))
    (tmp_path / "other.json").write_text("no JSON")
    assert running_servers(tmp_path) == [here]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["here.json", "other.json"]
    assert running_servers(tmp_path / "nowhere") == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system keeps what it was at the start")
def test_clock_put_right_loses_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = RunningServer(os.getpid(), began_at(os.getpid()), "12D3KooWpeer", "")
    control._write(tmp_path / "here.json", vars(here))
    before = psutil._pslinux.boot_time
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: before() + 3600)
    assert running_servers(tmp_path) == [here]


@pytest.mark.skipif(os.name != "posix", reason="there are no such signals")
async def test_signals_pause_and_resume() -> None:
    pause = Pause()
    async with trio.open_nursery() as nursery:
        await nursery.start(obey_signals, pause)
        os.kill(os.getpid(), signal.SIGUSR1)
        await pause.wait(True)
        os.kill(os.getpid(), signal.SIGUSR2)
        await pause.wait(False)
        nursery.cancel_scope.cancel()


@pytest.mark.skipif(os.name != "posix", reason="signals are heard otherwise there")
async def test_stop_ends_server_as_service_manager_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "control_folder", lambda: tmp_path)
    with trio.open_signal_receiver(signal.SIGTERM) as received:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Control(tmp_path, Pause(), "12D3KooWpeer", "attic").run)
            while not running_servers(tmp_path):
                await trio.lowlevel.checkpoint()
            await trio.to_thread.run_sync(control.send_wish, "attic", "stop", Output(False))
            async for number in received:
                assert number == signal.SIGTERM
                break
            nursery.cancel_scope.cancel()
    here = RunningServer(os.getpid(), 0.0, "12D3KooWpeer", "attic")
    assert control._answer(tmp_path, here, "x", "stop") is here  # it has ended already


def test_the_command_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "control_folder", lambda: tmp_path)
    with pytest.raises(MachineError, match="no server of yours runs"):
        control.send_wish(None, "pause", Output(False))
    said = RunningServer(os.getpid(), began_at(os.getpid()), "12D3KooWABCDEFGH", "attic")
    control._write(tmp_path / f"{said.pid}.json", vars(said))
    with pytest.raises(BadInput, match="attic"):
        control.send_wish("cellar", "pause", Output(False))
    monkeypatch.setattr(control, "CONTROL", replace(control.CONTROL, patience=0.0))
    for given in ("attic", "ABCDEFGH", "…ABCDEFGH", str(said.pid), None):
        with pytest.raises(MachineError, match="does not answer"):
            control.send_wish(given, "pause", Output(False))
