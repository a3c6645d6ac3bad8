"""`petalnode plan` as a person and a script meet it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import environment, nodes, petalnode, until
from tests.tiny_models import save_tiny

PROVED = ("--seconds", "600")  # though the machine is busy
MACHINES = {
    "model": {"blocks": 6},
    "client": {"region": "home"},
    "machines": [
        {"name": "attic", "blocks": 6, "ms_per_block": 10, "region": "home"},
        {"name": "fast", "blocks": 4, "ms_per_block": 1, "region": "office"},
        {"name": "far", "blocks": 6, "ms_per_block": 0.5, "region": "mars"},
    ],
    "rtt_ms": {"home": {"office": 10, "mars": 1000}, "office": {"mars": 1000}},
}

OWN = [
    {"name": name, "blocks": 2, "ms_per_block": 12, "region": "home", "trusted": True} for name in ("desk", "laptop")
]


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    path = tmp_path / "machines.json"
    path.write_text(json.dumps(MACHINES))
    return path


def test_a_plan_for_a_file_of_machines(machines: Path, home: Path) -> None:
    outcome = petalnode("plan", "--machines", str(machines), *PROVED, "--json", env=environment(home))
    assert outcome.code == 0, outcome
    (plan,) = outcome.objects
    assert plan["num_blocks"] == 6 and "now" not in plan
    fastest = plan["fastest"]
    # The client and the attic are beside each other; two blocks there, and four on the fast one over there. Each
    # takes a millisecond to handle a step.
    assert sorted(
        (machine["name"], machine["blocks"][1] - machine["blocks"][0]) for machine in fastest["machines"]
    ) == [
        ("attic", 2),
        ("fast", 4),
    ]
    assert fastest["ms_per_token"] == fastest["least_ms_per_token"] == pytest.approx(20 + 4 + 0.5 + 5 + 5 + 2)
    assert fastest["proved"] is True
    busiest = plan["busiest"]
    assert {machine["name"] for machine in busiest["machines"]} == {"attic", "fast", "far"}
    assert fastest["tokens_per_second"] < busiest["tokens_per_second"] <= busiest["most_tokens_per_second"]
    table = petalnode("plan", "--machines", str(machines), *PROVED, env=environment(home))
    assert table.code == 0 and "there is no faster chain" in table.out and "attic" in table.out, table


def test_plan_keeps_sharing_blocks_on_one_machine(machines: Path, tmp_path: Path, home: Path) -> None:
    """The fast machine has room for three blocks: it would hold the last three, and here it holds the first two."""
    folder = save_tiny("gemma4_shared", tmp_path / "model")
    fast = {**MACHINES["machines"][1], "blocks": 3}
    near = MACHINES | {"rtt_ms": {"home": {"office": 10}}}
    machines.write_text(json.dumps(near | {"machines": [MACHINES["machines"][0], fast]}))
    outcome = petalnode("plan", str(folder), "--machines", str(machines), *PROVED, "--json", env=environment(home))
    assert outcome.code == 0, outcome
    (plan,) = outcome.objects
    assert plan["together"] == [2, 6] and plan["fastest"]["proved"]
    for kind in ("fastest", "busiest"):
        held = [(machine["name"], machine["blocks"]) for machine in plan[kind]["machines"]]
        assert held == [("fast", [0, 2]), ("attic", [2, 6])], kind
    ends = [tensor.nbytes for name, tensor in load_file(folder / "model.safetensors").items() if ".layers." not in name]
    assert plan["client_bytes"] == sum(ends)
    machines.write_text(json.dumps(near | {"machines": [fast, {**fast, "name": "slow", "region": "home"}]}))
    outcome = petalnode("plan", str(folder), "--machines", str(machines), env=environment(home))
    assert outcome.code == 3 and "one machine holds all 4 of the blocks 2:6" in outcome.err, outcome


def test_a_plan_with_trusted_machines_at_both_ends(tmp_path: Path, home: Path) -> None:
    file = tmp_path / "machines.json"
    file.write_text(json.dumps(MACHINES | {"machines": [*MACHINES["machines"], *OWN]}))
    outcome = petalnode(
        "plan", "--machines", str(file), "--trusted-blocks", "1", *PROVED, "--json", env=environment(home)
    )
    assert outcome.code == 0, outcome
    (plan,) = outcome.objects
    assert plan["trusted_blocks"] == 1 and plan["fastest"]["proved"]
    route = plan["fastest"]["route"]
    assert [machine["blocks"] for machine in route] == [[0, 1], [1, 5], [5, 6]]
    assert [machine.get("trusted", False) for machine in route] == [True, False, True] and route[1]["name"] == "fast"
    # To the first 0.5, and through the client to the fast one 0.5 + 5; from there 5 to the last, and 0.5.
    assert plan["fastest"]["ms_per_token"] == pytest.approx(2 * 12 + 4 * 1 + 0.5 + 5.5 + 5 + 0.5 + 3)
    table = petalnode("plan", "--machines", str(file), "--trusted-blocks", "1", env=environment(home))
    assert "for trusted machines (*)" in table.out and "desk *" in table.out, table


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("--machines {nothing}", 2, "{nothing} cannot be read"),
        ("--machines {machines} --num-blocks 17", 3, "together hold 16 of 17 blocks"),
        ("--machines {few}", 2, "how many blocks has the model"),
        ("no-such-model --machines {few}", 2, "no-such-model"),
        ("--num-blocks 4 --peer /ip4/127.0.0.1/tcp/1/p2p/x", 2, "go with --machines"),
        ("--trusted-blocks 2 --peer /ip4/127.0.0.1/tcp/1/p2p/x", 2, "goes with --machines"),
        ("--machines {machines} --trusted-blocks 1", 2, "no machine is trusted"),
        ("--machines {own} --trusted-blocks 1", 3, "the only trusted machine holds 2 of 6 blocks"),
        ("", 2, "--peer"),
    ],
)
def test_a_mistake_is_one_clear_line(
    arguments: str, code: int, says: str, machines: Path, home: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few.json"
    few.write_text(json.dumps(MACHINES["machines"][:1]))
    own = tmp_path / "own.json"
    own.write_text(json.dumps(MACHINES | {"machines": [*MACHINES["machines"], OWN[0]]}))
    places = {"machines": machines, "few": few, "own": own, "nothing": tmp_path / "nothing.csv"}
    outcome = petalnode("plan", *arguments.format(**places).split(), env=environment(home), cwd=tmp_path)
    assert outcome.code == code, outcome
    assert "Traceback" not in outcome.err, outcome
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("petalnode:")]
    assert says.format(**places) in line, outcome


def test_a_plan_for_a_running_swarm(shared_swarm: SharedSwarm, home: Path) -> None:
    several = petalnode("plan", "--peer", shared_swarm.peer, env=environment(home))
    assert several.code == 2 and "tiny-gemma3, tiny-gpt2, tiny-llama" in several.err, several
    for _ in range(20):
        outcome = petalnode("plan", "tiny-llama", "--peer", shared_swarm.peer, "--json", env=environment(home))
        if "did not answer within" not in outcome.err:  # as on a busy machine
            break
    assert outcome.code == 0, outcome
    (plan,) = outcome.objects
    servers = {node.ready["peer_id"] for node in shared_swarm.llama}
    assert plan["num_blocks"] == 6
    assert {machine["peer_id"] for machine in plan["now"]["machines"]} == servers
    assert [machine["blocks"] for machine in plan["now"]["route"]] == [[0, 2], [2, 4], [4, 6]]
    # All three are needed, so no plan does better than another by leaving one out.
    assert sum(machine["blocks"][1] - machine["blocks"][0] for machine in plan["fastest"]["machines"]) == 6
    assert 0 < plan["fastest"]["ms_per_token"] <= plan["now"]["ms_per_token"] + 1e-3


def test_what_fits_is_told_without_a_network(machines: Path, tmp_path: Path, home: Path) -> None:
    file = tmp_path / "fleet.json"
    boxes = [{"name": name, "device": kind, "region": "home"} for name, kind in (("desk", "cpu"), ("box", "rtx3090"))]
    file.write_text(json.dumps({"machines": boxes}))
    outcome = petalnode("fit", "--machines", str(file), "--json", env=environment(home))
    assert outcome.code == 0, outcome
    found = {line["model"]: line for line in outcome.objects}
    assert found["Qwen/Qwen3-8B"]["fits"] and found["Qwen/Qwen3-8B"]["tokens_per_second"] > 1
    large = found["meta-llama/Llama-3.1-405B-Instruct"]
    assert not large["fits"] and large["machines_missing"] > 1 and large["missing_bytes"] > 1e11
    one = petalnode("fit", "Llama-3.1-70B-Instruct", "--machines", str(file), env=environment(home))
    assert one.code == 0 and one.out.count("Llama-3.1-70B") == 3 and "GB missing" in one.out, one
    plan = petalnode("plan", "Llama-3.1-8B-Instruct", "--machines", str(file), "--json", env=environment(home))
    assert plan.code == 0 and plan.objects[0]["num_blocks"] == 32, plan
    assert petalnode("fit", "nobody/knows-this", env=environment(home)).code == 2
    counted = petalnode("fit", "--machines", str(machines), env=environment(home))
    assert counted.code == 2 and "block_mb" in counted.err, counted


def test_this_machine_and_files_on_it_without_swarm(shared_swarm: SharedSwarm, home: Path, tmp_path: Path) -> None:
    here = petalnode("fit", "smollm2", "--json", env=environment(home))
    assert here.code == 0 and here.objects[0]["tokens_per_second"] > 0, here
    plan = petalnode("plan", str(shared_swarm.folder), env=environment(home))
    assert plan.code == 0 and "tiny-llama" in plan.out and "fits" in plan.out, plan
    kept = shutil.copytree(shared_swarm.folder, tmp_path / "cache" / "petalnode" / "models" / "peers-one-1")
    (kept / "name").write_text("org/tiny")
    plan = petalnode("plan", "--json", env=environment(tmp_path))
    assert plan.code == 0 and plan.objects[-1]["model"] == "org/tiny", plan
    assert plan.objects[-1]["weights"] == "as it is" and plan.objects[-1]["fits"], plan


def test_a_swarm_fits_what_its_servers_could_hold(shared_swarm: SharedSwarm, home: Path) -> None:
    outcome = petalnode("fit", "--peer", shared_swarm.peer, env=environment(home))
    assert outcome.code == 2 and "--machines FILE" in outcome.err, outcome  # nobody knows these models
    cwd = shared_swarm.models
    outcome = petalnode("fit", "tiny-llama", "--json", "--peer", shared_swarm.peer, env=environment(home), cwd=cwd)
    assert outcome.code == 0 and all(line["fits"] for line in outcome.objects), outcome


def test_strangers_announcements_end_neither_plan_nor_fit(home: Path, tmp_path: Path) -> None:
    """Of another version with one block of 32; in weights that nobody knows."""
    model = {"model_name": "meta-llama/Llama-3.1-8B-Instruct", "num_blocks": 32}
    with nodes(tmp_path) as started:
        peers = started.announcer(**model, blocks=[0, 32]).event("ready")["addrs"][:1]
        for stranger in ({"model_version": "00" * 32}, {"quantisation": "int3"}):
            started.announcer(**model, **stranger, blocks=[0, 1], peers=peers).event("ready")
        at = ("--peer", peers[0], "--json")

        def are_known() -> bool:
            known = petalnode("status", *at, env=environment(home)).objects
            return sum(len(found["servers"]) for found in known) == 3

        until(are_known, "all are known")
        plan = petalnode("plan", model["model_name"], *at, env=environment(home))
        assert plan.code == 0 and len(plan.objects) == 1, plan
        assert "left out: the machines together hold 1 of 32 blocks" in plan.err, plan
        fits = petalnode("fit", model["model_name"], *at, env=environment(home))
        assert fits.code == 0 and fits.objects, fits
