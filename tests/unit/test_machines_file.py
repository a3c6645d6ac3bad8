from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from petalnode.node.errors import BadInput
from petalnode.node.placement.planning.machines_file import MACHINES, fleet_of, read_machines
from petalnode.node.placement.planning.plans import busiest_plan, fastest_plan
from tests.import_graph import ROOT

TWO = [
    {"name": "attic", "blocks": 4, "ms_per_block": 10, "region": "home"},
    {"name": "office", "blocks": 8, "ms_per_block": 5, "region": "eu-central-1"},
]


def written(folder: Path, content: object, name: str = "machines.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_json_says_all_there_is_to_say(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "model": {"blocks": 12, "block_mb": 100},
            "client": {"region": "home", "ms_per_token": 3},
            "machines": [*TWO, {"name": "gpu", "device": "RTX3090", "region": "eu-west-1", "rtt_ms": {"attic": 31}}],
            "rtt_ms": {"home": {"eu-central-1": 20, "eu-west-1": 40}},
        },
    )
    file = read_machines(path)
    assert (file.num_blocks, file.block_bytes) == (12, 100e6)
    fleet = fleet_of(file, 12, file.block_bytes)
    assert [machine.name for machine in fleet.machines] == ["attic", "office", "gpu"]
    assert [machine.blocks for machine in fleet.machines] == [4, 8, 12]  # never more than there are
    assert fleet.machines[1].block_seconds == 0.005
    assert 0 < fleet.machines[2].block_seconds < 0.001
    assert fleet.rtts[0, 1] == fleet.rtts[1, 0] == 0.02
    assert fleet.rtts[0, 2] == 0.031  # the name counts more than the region
    assert 0.005 < fleet.rtts[1, 2] < 0.05  # from the table of regions
    assert fleet.client_rtts is not None
    assert fleet.client_rtts.tolist() == [MACHINES.same_region_seconds, 0.02, 0.04]
    assert fleet.client_seconds == 0.003


def test_csv_says_the_same(tmp_path: Path) -> None:
    text = """name,blocks,memory_gb,ms_per_block,region,rtt_ms:home
attic,4,,10,home,
office,,0.8,5,eu-central-1,20
client,,,,home,
"""
    fleet = fleet_of(read_machines(written(tmp_path, text, "machines.csv")), 12, 100e6)
    assert [machine.blocks for machine in fleet.machines] == [4, 8]
    assert fleet.rtts[0, 1] == 0.02
    assert fleet.client_rtts is not None and fleet.client_rtts[0] == MACHINES.same_region_seconds


def test_trusted_machines_are_marked(tmp_path: Path) -> None:
    text = "name,blocks,ms_per_block,region,trusted\nattic,4,10,home,true\noffice,4,10,home,False\nshed,4,10,home,\n"
    in_csv = read_machines(written(tmp_path, text, "machines.csv"))
    marked = [TWO[0] | {"region": "home", "trusted": True}, TWO[0] | {"name": "shed", "region": "home"}]
    in_json = read_machines(written(tmp_path, marked))
    assert [row.trusted for row in (*in_csv.rows, *in_json.rows)] == [True, False, False, True, False]
    assert [machine.trusted for machine in fleet_of(in_csv, 12, None).machines] == [True, False, False]
    assert (fleet_of(in_csv, 12, None).trusted_blocks, fleet_of(in_csv, 12, None, 5).trusted_blocks) == (2, 5)
    nobody = read_machines(written(tmp_path, [marked[1]]))
    assert fleet_of(nobody, 12, 1e6).trusted_blocks == 0
    with pytest.raises(BadInput, match="no machine is trusted: mark your own ones"):
        fleet_of(nobody, 12, 1e6, 2)


def test_csv_without_a_way_to_the_client(tmp_path: Path) -> None:
    text = "name,blocks,ms_per_block,region\nattic,4,10,eu-west-1\nclient,,,home\n"
    with pytest.raises(BadInput, match=r"how far is client \(home\) from attic \(eu-west-1\)"):
        fleet_of(read_machines(written(tmp_path, text, "m.csv")), 4, None)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("7", "a list of machines"),
        ([], "no machines"),
        ({"machines": "x"}, "no machines"),
        ({"machines": TWO, "mashines": []}, "mashines is not known"),
        ([7], "machine 1: an object"),
        ([{"blocks": 2}], "machine 1 has no name"),
        ([{"name": ""}], "name is a text"),
        ([TWO[0], TWO[0]], "two machines are called attic"),
        ([TWO[0] | {"block": 2}], "attic: block is not known"),
        ([TWO[0] | {"blocks": -1}], "attic: blocks is a number and not negative"),
        ([TWO[0] | {"blocks": 2.5}], "attic: blocks is a whole number"),
        ([TWO[0] | {"blocks": 1_000_000}], "attic: blocks is a whole number from 0 to 512"),
        ([TWO[0] | {"blocks": True}], "attic: blocks is a number"),
        ([TWO[0] | {"ms_per_block": "fast"}], "attic: ms_per_block is a number"),
        ([TWO[0] | {"ms_per_block": float("nan")}], "attic: ms_per_block is a number"),
        ([TWO[0] | {"ms_per_block": 0}], "attic: ms_per_block is 0"),
        ([TWO[0] | {"device": "abacus"}], "attic: no device abacus is known, only a100"),
        ([TWO[0] | {"trusted": 1}], "attic: trusted is true or false"),
        ([TWO[0] | {"rtt_ms": 3}], "attic: an object is needed"),
        ([TWO[0] | {"rtt_ms": {"nobody": 3}}], "nothing here is called nobody"),
        ({"machines": TWO, "rtt_ms": {"home": {"mars": 1}}}, "nothing here is called mars"),
        ({"machines": TWO, "client": {"name": "me"}}, "the client: name is not known"),
        ({"machines": TWO, "model": {"blocks": 0}}, "model: blocks is a whole number from 1"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, content: object, says: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(BadInput, match=says) as caught:
        read_machines(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the first line of a CSV file names its columns"),
        ("blocks,ms_per_block\n1,2\n", "the first line of a CSV file names its columns"),
        ("name,blocks\na,1,2\n", "line 2 has not 2 columns"),
        ("name,blocks\na\n", "line 2 has not 2 columns"),
        ("name,blocks\na,many\n", "a: blocks is a number"),
        ("name,colour\na,red\n", "a: colour is not known"),
    ],
)
def test_a_table_that_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        read_machines(written(tmp_path, text, "machines.csv"))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(BadInput, match="cannot be read"):
            read_machines(path)
    binary = tmp_path / "machines.csv"
    binary.write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(BadInput, match="cannot be read"):
        read_machines(binary)


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ({"ms_per_block": 1}, "one: how many blocks can it hold"),
        ({"blocks": 1}, "one: how fast is it"),
        ({"device": "m2"}, "one: how large is a block"),  # the least memory that is sold counts
        ({"memory_gb": 3, "ms_per_block": 1}, "one: how large is a block"),
        ({"device": "rtx3090"}, "one: how large is a block"),
    ],
)
def test_a_machine_of_which_too_little_is_said(tmp_path: Path, machine: dict[str, object], says: str) -> None:
    file = read_machines(written(tmp_path, [{"name": "one"} | machine]))
    with pytest.raises(BadInput, match=says):
        fleet_of(file, 4, None)


def test_two_machines_of_unknown_distance(tmp_path: Path) -> None:
    file = read_machines(written(tmp_path, TWO))
    with pytest.raises(BadInput, match=r"how far is office \(eu-central-1\) from attic \(home\)"):
        fleet_of(file, 4, None)


def test_both_examples_of_the_page_can_be_planned(tmp_path: Path) -> None:
    blocks = re.findall(r"(?:^ {4}.*\n)+", (ROOT / "docs/planning.md").read_text(), re.MULTILINE)
    for name, begin in (("fleet.json", "    {"), ("fleet.csv", "    name,")):
        [example] = [block for block in blocks if block.startswith(begin)]
        file = read_machines(written(tmp_path, textwrap.dedent(example), name))
        fleet = fleet_of(file, 80, 1712e6)  # the options that the page names
        plan = busiest_plan(fleet, 80)
        assert plan is not None and fastest_plan(fleet, 80, seconds=0.1, known=[plan]) is not None, name
