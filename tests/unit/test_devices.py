"""How the blocks of one server are shared out among its devices, and which devices it may have."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.cli.model_choice import check_devices
from petalnode.node.errors import BadInput, MachineError
from petalnode.node.models import resolve
from petalnode.node.models.cache_dir import cache_dir
from petalnode.node.server.lifecycle import devices
from petalnode.node.server.lifecycle.devices import cut, plan_memory, share_out
from petalnode.node.server.lifecycle.memory import Memory, Room
from petalnode.node.server.lifecycle.options import ServerOptions, check_blocks
from petalnode.protocols.ids import Boundaries, Span
from tests.tiny_models import save_tiny

GIB = 1 << 30
pytestmark = pytest.mark.usefixtures("cache")


def rooms(*held: tuple[str, int]) -> list[Room]:
    return [Room(*one) for one in held]


@pytest.mark.parametrize(
    ("held", "count", "expected"),
    [
        ([("cpu", 40), ("cpu", 40)], 6, [3, 3]),
        ([("cpu", 40), ("cpu", 40)], 3, [2, 1]),
        ([("cuda:0", 20), ("cuda:1", 10)], 15, [10, 5]),
        ([("cuda:0", 20), ("cuda:1", 10)], 30, [20, 10]),
        ([("cuda:0", 20), ("cuda:1", 10), ("cpu", 100)], 32, [20, 10, 2]),
        ([("cuda:0", 20), ("cuda:1", 10), ("cpu", 100)], 16, [10, 5, 1]),  # each has one at least
        ([("cpu", 100), ("cuda:0", 20)], 32, [12, 20]),
        ([("cuda:0", 1), ("cuda:1", 30)], 20, [1, 19]),
        ([("cuda:0", 5), ("cpu", 5)], 2, [1, 1]),
    ],
)
def test_accelerators_get_blocks_by_room_first(held: list[tuple[str, int]], count: int, expected: list[int]) -> None:
    assert share_out(count, rooms(*held)) == expected
    parts = cut(Span(3, 3 + count), rooms(*held))
    assert [len(part) for part in parts] == expected and (parts[0].start, parts[-1].end) == (3, 3 + count)
    assert all(one.end == other.start for one, other in pairwise(parts))


@pytest.mark.parametrize("count", [1, 31])
def test_blocks_for_which_devices_have_no_room(count: int) -> None:
    with pytest.raises(MachineError, match=rf"{count} blocks .* 20 on cuda:0, 10 on cuda:1: 2 to 30 can"):
        share_out(count, rooms(("cuda:0", 20), ("cuda:1", 10)))
    assert cut(Span(0, count), ()) == [Span(0, count)]


def plan(folder: Path, *names: str, **options: Any) -> Any:
    return plan_memory(resolve(folder), ServerOptions(str(folder), devices=names, dtype="float32", **options))


def test_parts_of_one_memory_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What programs share is parted between the devices in it, and claimed; an accelerator has its own."""
    folder = save_tiny("llama", tmp_path / "model")
    free = 20 * GIB
    monkeypatch.setattr(devices, "device_memory", lambda device: Memory(free, free))
    one, both = plan(folder, "cpu"), plan(folder, "cpu", "cpu")
    assert (one.count, one.rooms, both.count, both.reason) == (6, (), 6, "6 of 6 blocks: 3 on cpu, 3 on cpu")
    assert both.rooms[0] == both.rooms[1] and one.nbytes < both.nbytes < 2 * one.nbytes
    claimed = json.loads((cache_dir() / "claims" / f"{os.getpid()}.json").read_bytes())
    assert claimed["bytes"] == both.nbytes

    computing = both.nbytes - one.nbytes
    per_block = (one.nbytes - computing) // 6
    free = 2 * (computing + 4 * per_block)
    fewer = plan(folder, "cpu", "cpu")  # a quarter stays free for other programs
    assert [room.blocks for room in fewer.rooms] == [2, 2] and fewer.count == 4
    with pytest.raises(MachineError, match=r"--device cpu holds no block: one takes .* fewer --cache-tokens"):
        plan(folder, "cpu", "cpu", cache_tokens=1 << 20)
    chosen = plan(folder, "cpu", "cpu", blocks=Span(1, 6))  # with the smallest cache, and nothing is kept free
    assert chosen.count == 5 and cut(Span(1, 6), chosen.rooms) == [Span(1, 4), Span(4, 6)]


@pytest.mark.parametrize(
    ("held", "undivided", "span", "expected"),
    [
        ((40, 40), [(18, 35)], (0, 35), [18, 17]),
        ((40, 40), [(10, 35)], (0, 35), [10, 25]),  # 18 and 17, if they could part
        ((9, 40), [(10, 35)], (0, 35), [6, 29]),
        ((40, 40), [(10, 35)], (2, 10), [4, 4]),
        ((40, 40, 40), [(2, 6), (6, 10)], (0, 11), [2, 4, 5]),
        ((6, 4, 1), [(2, 6), (6, 10)], (0, 11), [6, 4, 1]),
        ((40,) * 8, [(start, start + 2) for start in range(0, 80, 2)], (0, 80), [10] * 8),
        ((12,) * 9, [(start, start + 2) for start in range(1, 79, 2)], (0, 80), [9, 8, 10, 8, 10, 8, 10, 8, 9]),
    ],
)
def test_blocks_that_share_keys_stay_together(
    held: tuple[int, ...], undivided: list[tuple[int, int]], span: tuple[int, int], expected: list[int]
) -> None:
    boundaries = Boundaries(8, 80, undivided=tuple(Span(*one) for one in undivided))
    parts = cut(Span(*span), rooms(*(("cuda", blocks) for blocks in held)), boundaries)
    assert [len(part) for part in parts] == expected and (parts[0].start, parts[-1].end) == span
    assert all(one.end == other.start and boundaries.may_part(one.end) for one, other in pairwise(parts))


def test_devices_without_room_for_what_stays_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks 2 to 5 of 6 share keys: a server holds these four, with those before them or without."""
    folder = save_tiny("gemma3n_shared", tmp_path / "model")
    free = 20 * GIB
    monkeypatch.setattr(devices, "device_memory", lambda device: Memory(free, free))
    one, both = plan(folder, "cpu"), plan(folder, "cpu", "cpu")
    assert both.count == 6 and both.reason == "6 of 6 blocks: 2 on cpu, 4 on cpu"
    assert plan(folder, "cpu", "cpu", blocks=Span(1, 6)).reason == "5 of 6 blocks: 1 on cpu, 4 on cpu"
    with pytest.raises(MachineError, match=r"blocks 2:6 cannot be on 2 devices.* some stay on one device \(2:6\)"):
        plan(folder, "cpu", "cpu", num_blocks=4)

    computing = both.nbytes - one.nbytes
    per_block = (one.nbytes - computing) // 6
    for blocks in (1, 3):  # on each; a quarter stays free for other programs
        free = 8 * (computing + blocks * per_block + per_block // 2) // 3
        assert plan(folder, "cpu", "cpu").reason == "2 of 6 blocks: 1 on cpu, 1 on cpu"


@pytest.mark.parametrize("options", [{"blocks": Span(1, 3)}, {"num_blocks": 2}, {}])
def test_more_devices_than_blocks_are_refused(options: Any, tmp_path: Path) -> None:
    folder = resolve(save_tiny("llama", tmp_path / "model"))
    count = 6 if not options else 2
    check_blocks(ServerOptions("tiny", devices=("cpu",) * count, **options), folder)
    with pytest.raises(BadInput, match=rf"{count + 1} devices are more than {count} blocks: give --device fewer times"):
        check_blocks(ServerOptions("tiny", devices=("cpu",) * (count + 1), **options), folder)


@pytest.mark.parametrize(
    ("names", "error", "reason"),
    [
        (("cuda:1", "cpu", "cuda:1"), BadInput, "--device cuda:1 is given twice"),
        (("cuda", "cuda:0"), BadInput, "--device cuda:0 is given twice"),
        (("mps", "mps"), BadInput, "--device mps is given twice"),
        (("cpu", "auto"), BadInput, "--device auto is one device"),
        (("auto", "auto"), BadInput, "--device auto is given twice"),
        (("cpu", "tpu"), BadInput, "--device tpu: use auto, cpu, mps, cuda or cuda:N"),
        (("cpu", "cuda:7"), MachineError, "this machine has no device 'cuda:7'"),
    ],
)
def test_devices_that_cannot_be_had_together(names: tuple[str, ...], error: type[Exception], reason: str) -> None:
    assert torch.cuda.device_count() < 8
    check_devices(("cpu", "cpu"))
    check_devices(("auto",))
    with pytest.raises(error, match=reason):
        check_devices(names)
