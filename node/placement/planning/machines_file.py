"""The machines of a plan and the round trips between them, and the file in which a person writes them: JSON or CSV, as
docs/planning.md says."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from ....protocols.ids import Boundaries, Span
from ...errors import BadInput
from ...swarm import cost
from ...swarm.cost import COST, Floats, bounded
from ...swarm.trusted_servers import TRUSTED_BLOCKS
from .cycle import Problem, shortest_ways


@dataclass(frozen=True)
class MachinesLimits:
    """What a file of machines may have, and what is assumed where it says nothing."""

    max_machines: int = 1000
    max_blocks: int = 512
    """The largest models have 126; with far more, looking for a plan would take minutes."""
    same_region_seconds: float = 0.001
    """A round trip between two machines of one region, where the file does not say."""
    max_bytes: int = 16 << 20
    least_block_mb: float = 1e-6
    memory_share: float = 0.8
    """Part of a device's memory that blocks may take; caches and activations need the rest."""
    cache_tokens: int = 8192
    """Tokens that the attention caches of a server are to have room for when it chooses its blocks."""
    copies: int = 12  # Hidden states that are there at once while a long prefill is computed, in float32
    bandwidth_share: float = 0.75
    """Part of the memory's bandwidth that a decode step reaches, which reads every weight once and does little else. Of
    the devices in table 2 of the Berkeley report (EECS-2024-111): A100 0.70, RTX 3090 0.84, A10G 0.76. The compiled
    kernels reach 0.56 to 0.96 of what two cores of a Xeon read (matrices of 4 to 16 bits)."""
    client_seconds: float = 0.008
    """A client's part of a token beside its head, with what the first server waits for it: embedding, choosing,
    hashing, checking the receipt. 7 to 10 ms on two cores of a Xeon."""


MACHINES: Final = MachinesLimits()
_KEYS: Final = ("name", "device", "region", "blocks", "memory_gb", "ms_per_block", "trusted", "rtt_ms")
_CLIENT_KEYS: Final = ("region", "rtt_ms", "ms_per_token")
CLIENT: Final = "client"
DEVICES: Final[Mapping[str, tuple[float, float]]] = {
    "a100-40": (40, 1555),
    "a100-80": (80, 2039),
    "a10g": (24, 600),
    "h100": (80, 3350),
    "h200": (141, 4800),
    "l4": (24, 300),
    "l40s": (48, 864),
    "rtx3060": (12, 360),
    "rtx3090": (24, 936),
    "rtx4060": (8, 272),
    "rtx4090": (24, 1008),
    "rtx5090": (32, 1792),
    "t4": (16, 320),
    "v100": (16, 900),
    "m1": (8, 68),
    "m2": (8, 100),
    "m3": (8, 100),
    "m4": (16, 120),
    "cpu": (16, 40),
}
"""Memory in 10^9 bytes (the least that is sold, where it differs: `memory_gb` says what there is) and its bandwidth in
10^9 bytes per second, by the makers' data sheets; a laptop's processor with two channels of memory for `cpu`."""
SHARED: Final = frozenset({"cpu", "m1", "m2", "m3", "m4"})
"""Those whose memory is that of all programs."""
_TABLE = Path(__file__).with_name("regions.csv")


@dataclass(frozen=True)
class Machine:
    """`blocks` is how many it could hold, `block_seconds` what one takes of a decode step; `span` what it holds now;
    `trusted` says that it is the user's own."""

    name: str
    blocks: int
    block_seconds: float
    span: Span | None = None
    trusted: bool = False


@dataclass(frozen=True)
class Fleet:
    """Machines with `rtts` float [N, N] in seconds between them, NaN where nobody knows.

    `client_rtts` float [N] are from the client; None where the client may sit beside whichever machine comes first.
    `client_seconds` is its own part of a token, embeddings and head; `client_bandwidth` the bytes of a head that it
    reads per second. 0: not known. With `trusted_blocks` above 0, only trusted machines hold this number of the first
    and of the last blocks (`swarm.trusted_servers`). `boundaries` of the blocks; None: machines may part anywhere.
    """

    machines: tuple[Machine, ...]
    rtts: Floats = field(repr=False)
    client_rtts: Floats | None = field(default=None, repr=False)
    client_seconds: float = 0.0
    trusted_blocks: int = 0
    client_bandwidth: float = 0.0
    boundaries: Boundaries | None = None

    def problem(self, num_blocks: int) -> Problem:
        """The machines, and after them the client, if there is one, as the home.

        Pairs without a measurement go through the client, as in a route; without a client they take MAX_SECONDS. The
        way to a machine has its handling of a step in it.
        """
        size = len(self.machines)
        ways = cost.one_way(self.rtts)
        halves = None if self.client_rtts is None else bounded(self.client_rtts) / 2
        if halves is not None:
            ways = np.minimum(ways, halves[:, None] + halves)
            if self.trusted_blocks:
                own = np.array([machine.trusted for machine in self.machines])
                ways = np.where(own[:, None] & ~own, halves[:, None] + halves, ways)  # they do not push to others
            ways = np.block([[ways, halves[:, None]], [halves[None, :], np.zeros((1, 1))]])
        ways[~np.isfinite(ways)] = COST.max_seconds
        ways[:, :size] += COST.handling_seconds
        np.fill_diagonal(ways, 0.0)
        home = [] if halves is None else [0]
        return Problem(
            capacity=np.array([machine.blocks for machine in self.machines] + home, np.intp),
            block_seconds=np.array([*(self.block_seconds()), *home], float),
            way=ways,
            num_blocks=num_blocks,
            home=size if home else None,
            boundaries=self.boundaries,
        )

    def detours(self, problem: Problem) -> Floats:
        """The ways of this fleet's `problem` by way of others. Where all of them are no shorter, ways are a metric.

        Without a client, one beside a machine could pass on what others send to each other, without the handling.
        """
        if self.client_rtts is not None:
            return shortest_ways(problem.way)
        handled = COST.handling_seconds * ~np.eye(len(problem), dtype=bool)
        sent = problem.way - handled
        shortest = shortest_ways(sent)
        return np.where(shortest < sent, shortest + handled, problem.way)

    def block_seconds(self) -> Floats:
        """Of each machine, not below what a server is believed."""
        return np.maximum(bounded([machine.block_seconds for machine in self.machines]), COST.min_block_seconds)


@dataclass(frozen=True)
class MachineRow:
    """What the file says of one machine; None where it says nothing. `rtts` are seconds, by machine or region."""

    name: str
    device: str | None = None
    region: str | None = None
    blocks: int | None = None
    memory: float | None = None  # bytes for blocks
    block_seconds: float | None = None
    trusted: bool = False
    rtts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MachinesFile:
    """The file as read: nothing in it depends on a model yet. `client` is None where the file names none."""

    path: Path
    rows: tuple[MachineRow, ...]
    client: MachineRow | None
    client_seconds: float
    rtts: Mapping[tuple[str, str], float]
    num_blocks: int | None
    block_bytes: float | None


def read_machines(path: Path) -> MachinesFile:
    """Reads a file of machines; JSON if its name ends so, else CSV.

    Raises:
        BadInput: it cannot be read; naming the machine and the field, and what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MACHINES.max_bytes + 1)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None
    if len(data) > MACHINES.max_bytes:
        raise BadInput(f"{path} is larger than {MACHINES.max_bytes >> 20} MiB: that is no list of machines")
    try:
        content = _from_json(text) if path.suffix.lower() == ".json" else _from_csv(text)
        return _read(path, content)
    except (BadInput, csv.Error) as error:
        raise BadInput(f"{path}: {error}") from None


def _from_json(text: str) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"this is no JSON: {error}") from None
    if isinstance(content, list):
        return {"machines": content}
    if not isinstance(content, dict):
        raise BadInput('a list of machines is needed, or {"machines": [...]}')
    return content


def _from_csv(text: str) -> Mapping[str, Any]:
    """The same content: a row per machine, RTTs in columns `rtt_ms:NAME`, the client in a row of that name."""
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    if not reader.fieldnames or "name" not in reader.fieldnames:
        raise BadInput(f"the first line of a CSV file names its columns (with commas): {', '.join(_KEYS)}:NAME")
    machines, client = [], None
    for number, row in enumerate(reader, start=2):
        if None in row or None in row.values():
            raise BadInput(f"line {number} has not {len(reader.fieldnames)} columns as the first line")
        said = {key: value.strip() for key, value in row.items() if value.strip()}
        rtts = {key.removeprefix("rtt_ms:"): said.pop(key) for key in list(said) if key.startswith("rtt_ms:")}
        if rtts:
            said["rtt_ms"] = rtts
        if said.get("name") == CLIENT:
            del said["name"]
            client = said
        elif said:
            machines.append(said)
    return {"machines": machines} | ({} if client is None else {CLIENT: client})


def _read(path: Path, content: Mapping[str, Any]) -> MachinesFile:
    _check_keys("the file", content, ("machines", CLIENT, "rtt_ms", "model"))
    entries = content.get("machines")
    if not isinstance(entries, list) or not entries:
        raise BadInput("it lists no machines")
    if len(entries) > MACHINES.max_machines:
        raise BadInput(f"it lists {len(entries)} machines; {MACHINES.max_machines} are the most")
    rows = tuple(_row(f"machine {number}", entry) for number, entry in enumerate(entries, start=1))
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"two machines are called {name}")
    client, client_seconds = None, 0.0
    if CLIENT in content:
        said = _object(CLIENT, content[CLIENT])
        _check_keys(f"the {CLIENT}", said, _CLIENT_KEYS)
        client = MachineRow(CLIENT, region=_text(CLIENT, said, "region"), rtts=_rtts(CLIENT, said.get("rtt_ms", {})))
        client_seconds = (_number(CLIENT, said, "ms_per_token") or 0.0) / 1000
    known = {*names, CLIENT, *(row.region for row in (*rows, *([client] if client else [])) if row.region)}
    model = _object("model", content.get("model", {}))
    _check_keys("model", model, ("blocks", "block_mb"))
    block_mb = _number("model", model, "block_mb")
    if block_mb is not None and block_mb < MACHINES.least_block_mb:
        raise BadInput(f"model: block_mb is {block_mb:g}, and no block is so small")
    return MachinesFile(
        path,
        rows,
        client,
        client_seconds,
        _all_rtts(content.get("rtt_ms", {}), [*rows, *([client] if client else [])], known),
        _count("model", model, "blocks", least=1),
        None if block_mb is None else block_mb * 1e6,
    )


def _row(what: str, entry: object) -> MachineRow:
    said = _object(what, entry)
    name = _text(what, said, "name")
    if name is None:
        raise BadInput(f"{what} has no name")
    _check_keys(name, said, _KEYS)
    device = _text(name, said, "device")
    if device is not None and device.lower() not in DEVICES:
        raise BadInput(f"{name}: no device {device} is known, only {', '.join(DEVICES)}: give blocks and ms_per_block")
    memory = _number(name, said, "memory_gb")
    milliseconds = _number(name, said, "ms_per_block")
    if milliseconds == 0:
        raise BadInput(f"{name}: ms_per_block is 0, and no machine is so fast")
    return MachineRow(
        name,
        None if device is None else device.lower(),
        _text(name, said, "region"),
        _count(name, said, "blocks", least=0),
        None if memory is None else memory * 1e9,
        None if milliseconds is None else milliseconds / 1000,
        _flag(name, said, "trusted"),
        _rtts(name, said.get("rtt_ms", {})),
    )


def fleet_of(
    file: MachinesFile, num_blocks: int, block_bytes: float | None, trusted_blocks: int | None = None
) -> Fleet:
    """The machines of the file for a model of `num_blocks` blocks of `block_bytes` bytes each (None: not known).

    `trusted_blocks` are at each end for trusted machines only. None for the usual number if the file has such machines.

    Raises:
        BadInput: it does not say enough of a machine, or of the way between two; or names no trusted machine.
    """
    own = any(row.trusted for row in file.rows)
    if not own and trusted_blocks is not None:
        raise BadInput(f'{file.path}: no machine is trusted: mark your own ones with "trusted": true')
    machines = tuple(_machine(row, num_blocks, block_bytes) for row in file.rows)
    rows = [*file.rows, *([] if file.client is None else [file.client])]
    rtts = np.zeros((len(rows), len(rows)))
    for number, one in enumerate(rows):
        for other_number, other in enumerate(rows[:number]):
            rtts[number, other_number] = rtts[other_number, number] = _round_trip(file, one, other)
    size = len(machines)
    client = None if file.client is None else rtts[size, :size]
    blocks = TRUSTED_BLOCKS if trusted_blocks is None else trusted_blocks
    return Fleet(machines, rtts[:size, :size], client, file.client_seconds, blocks if own else 0)


def _machine(row: MachineRow, num_blocks: int, block_bytes: float | None) -> Machine:
    device_memory, bandwidth = (None, None) if row.device is None else DEVICES[row.device]
    memory = row.memory
    if memory is None and device_memory is not None:
        memory = device_memory * 1e9 * MACHINES.memory_share
    if row.blocks is None and memory is None:
        raise BadInput(
            f"{row.name}: how many blocks can it hold? Give blocks, memory_gb or a device with its own memory"
        )
    if row.block_seconds is None and bandwidth is None:
        raise BadInput(f"{row.name}: how fast is it? Give ms_per_block or a device")
    if block_bytes is None and (row.blocks is None or row.block_seconds is None):
        raise BadInput(
            f'{row.name}: how large is a block? Say so in the file, "model": {{"block_mb": ..}}, or name a MODEL whose '
            "weights are here, or give blocks and ms_per_block of every machine"
        )
    blocks = row.blocks
    if blocks is None:
        assert memory is not None and block_bytes is not None
        blocks = int(memory / block_bytes)
    seconds = row.block_seconds
    if seconds is None:
        assert bandwidth is not None and block_bytes is not None
        seconds = block_bytes / (bandwidth * 1e9 * MACHINES.bandwidth_share)
    return Machine(row.name, min(blocks, num_blocks), seconds, trusted=row.trusted)


def _round_trip(file: MachinesFile, one: MachineRow, other: MachineRow) -> float:
    """Seconds: by the names of both, by a name and a region, by the regions in the file, in the table of regions."""
    regions = (one.region, other.region)
    for pair in ((one.name, other.name), (one.name, other.region), (one.region, other.name), regions):
        for key in (pair, pair[::-1]):
            if key in file.rtts:
                return file.rtts[key]  # type: ignore[index]
    if None not in regions:
        if regions in region_rtts():
            return region_rtts()[regions]  # type: ignore[index]
        if one.region == other.region:
            return MACHINES.same_region_seconds
    where = [row.name if row.region is None else f"{row.name} ({row.region})" for row in (one, other)]
    raise BadInput(
        f"{file.path}: how far is {where[0]} from {where[1]}? Give rtt_ms between them or their regions; cloud regions "
        f"such as eu-central-1 are known"
    )


def _all_rtts(between: object, rows: Sequence[MachineRow], known: set[str]) -> dict[tuple[str, str], float]:
    """All that the file says, by pair of names or regions."""
    found = {}
    for one, others in _object("rtt_ms", between).items():
        for other, seconds in _rtts(f"rtt_ms of {one}", others).items():
            found[one, other] = seconds
    for row in rows:
        for other, seconds in row.rtts.items():
            found[row.name, other] = seconds
    for pair in found:
        for name in pair:
            if name not in known:
                raise BadInput(f"rtt_ms: nothing here is called {name}, neither a machine nor a region of one")
    return found


def _rtts(what: str, said: object) -> dict[str, float]:
    return {other: (_number(what, {other: value}, other) or 0.0) / 1000 for other, value in _object(what, said).items()}


def _object(what: str, said: object) -> Mapping[str, Any]:
    if not isinstance(said, dict):
        raise BadInput(f"{what}: an object is needed, not {said!r:.60}")
    return said


def _check_keys(what: str, said: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in said:
        if key not in keys:
            raise BadInput(f"{what}: {key} is not known here, only {', '.join(keys)}")


def _text(what: str, said: Mapping[str, Any], key: str) -> str | None:
    value = said.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise BadInput(f"{what}: {key} is a text, not {value!r:.60}")
    return value.strip()


def _flag(what: str, said: Mapping[str, Any], key: str) -> bool:
    value = said.get(key, False)
    if str(value).lower() not in ("true", "false"):  # a text, in CSV
        raise BadInput(f"{what}: {key} is true or false, not {value!r:.60}")
    return str(value).lower() == "true"


def _number(what: str, said: Mapping[str, Any], key: str) -> float | None:
    value = said.get(key)
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < 1e9:
        raise BadInput(f"{what}: {key} is a number and not negative, not {value!r:.60}")
    return number


def _count(what: str, said: Mapping[str, Any], key: str, *, least: int) -> int | None:
    number = _number(what, said, key)
    if number is None:
        return None
    if number != int(number) or not least <= number <= MACHINES.max_blocks:
        raise BadInput(f"{what}: {key} is a whole number from {least} to {MACHINES.max_blocks}, not {said[key]!r:.60}")
    return int(number)


@cache
def region_rtts() -> Mapping[tuple[str, str], float]:
    """Seconds of a round trip by pair of regions, in both orders, one with itself too; regions.csv has the source."""
    with _TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(line for line in file if not line.startswith("#")))
    names = rows[0][1:]
    found = {
        (row[0], name): float(value) / 1000 for row in rows[1:] for name, value in zip(names, row[1:], strict=True)
    }
    # Measured from either side: the mean of both.
    return {(one, other): (found[one, other] + found[other, one]) / 2 for one, other in found}
