"""Which models fit where: sizes against what publishers say, and what is missing against what would suffice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from petalnode.node.blocks.architecture import block_sizes
from petalnode.node.cli.commands.planning import fit
from petalnode.node.cli.commands.planning.fit import hosts_of_file, size_as_here
from petalnode.node.errors import MachineError
from petalnode.node.placement.planning.machines_file import MACHINES, Fleet, Machine, fleet_of, read_machines
from petalnode.node.placement.planning.model_sizes import (
    WEIGHTS,
    MachineCapacity,
    ModelSize,
    best_fit,
    fit_of,
    hosts_of,
    known_model,
    known_models,
    size_by_config,
)
from petalnode.node.server.lifecycle.memory import MEMORY_SHARES, Memory, blocks_that_fit, cache_bytes_per_block
from petalnode.node.server.lifecycle.pausing import MachineMeter, MachineUse
from petalnode.node.swarm.cost import COST
from petalnode.protocols.ids import Boundaries, Span
from tests.mtp_heads import save_with_head

PUBLISHED = {
    "smollm2": 0.1345,
    "SmolLM2-135M-Instruct": 0.1345,
    "TinyLlama-1.1B-Chat-v1.0": 1.1,
    "Qwen3-0.6B": 0.596,
    "Qwen3-8B": 8.19,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.1,
    "Qwen2.5-7B-Instruct": 7.62,
    "Qwen2.5-72B-Instruct": 72.7,
    "Llama-3.2-1B-Instruct": 1.236,
    "Llama-3.2-3B-Instruct": 3.213,
    "Llama-3.1-8B-Instruct": 8.03,
    "Llama-3.1-70B-Instruct": 70.55,
    "Llama-3.1-405B-Instruct": 405.85,
    "Mistral-7B-Instruct-v0.3": 7.25,
    "Mistral-Small-24B-Instruct-2501": 23.57,
    "Mistral-Large-Instruct-2411": 122.6,
    "Mixtral-8x7B-Instruct-v0.1": 46.7,
    "Mixtral-8x22B-Instruct-v0.1": 140.6,
    "gemma-2-9b-it": 9.24,
    "gemma-2-27b-it": 27.2,
    "phi-4": 14.66,
}
"""10^9 parameters, by the model cards."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_gives_the_published_numbers(name: str) -> None:
    model = known_model(name)
    assert model is not None
    assert model.parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


def test_of_experts_a_token_reads_the_active_ones() -> None:
    mixture, dense = known_model("qwen/qwen3-30b-a3b"), known_model("Qwen3-8B")
    assert mixture is not None and dense is not None
    active = mixture.blocks * mixture.active_parameters
    assert 2.5e9 < active < 3.4e9
    assert dense.active_bytes("bf16") == dense.block_bytes("bf16") == 2 * dense.block_parameters
    assert [dense.block_bytes(one) for one in WEIGHTS] == sorted(
        (dense.block_bytes(one) for one in WEIGHTS), reverse=True
    )


def test_a_configuration_tells_the_same_as_the_table() -> None:
    config = {
        "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
    }  # fmt: skip
    assert size_by_config("Qwen/Qwen3-30B-A3B", config) == known_model("Qwen3-30B-A3B")
    assert size_by_config("x", {"text_config": config}) == size_by_config("x", config)
    assert size_by_config("x", {**config, "vocab_size": "many"}) is None


def test_what_configuration_leaves_out_is_what_transformers_takes() -> None:
    config = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
    found = size_by_config("gpt2", {**config, "num_experts_per_tok": 2, "moe_intermediate_size": 7})
    assert found == ModelSize("gpt2", 12, 768, 12, 12, 64, 3072, 50257, tied=False)
    assert size_by_config("x", {**config, "n_inner": 1000, "head_dim": 0}) == replace(found, name="x", width=1000)
    mixture = size_by_config("x", {**config, "num_local_experts": 8, "num_experts_per_tok": 2})
    assert mixture == replace(found, name="x", experts=8, active=2)
    assert size_by_config("x", {**config, "n_layer": 1 << 32}) is None
    largest = size_by_config("x", {**config, "n_layer": (1 << 32) - 1})
    assert largest is not None and largest.blocks == (1 << 32) - 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "text_config", "head_dim"]
                ),
                inner,
            )
        ),
    )
)
def test_any_configuration_is_read_or_not(value: object) -> None:
    if isinstance(value, dict):
        size_by_config("x", value)


def around(count: int) -> Fleet:
    return Fleet((Machine("x", 0, 1.0),) * count, np.zeros((count, count)), np.zeros(count))


@given(st.lists(st.floats(1.0, 200.0), min_size=1, max_size=4), st.sampled_from(known_models()))
def test_what_is_missing_suffices(gigabytes: list[float], model: object) -> None:
    assert isinstance(model, ModelSize)
    hosts = [MachineCapacity(str(number), memory * 1e9, 1e11) for number, memory in enumerate(gigabytes)]
    found = best_fit(hosts, around(len(hosts)), model)
    if found.fits:
        assert 0 < found.tokens_per_second <= 1e11 / (model.blocks * model.active_bytes(found.weights)) * 1.0001
        return
    assert found.weights == "Q4_K_M"
    more = [*hosts, MachineCapacity("more", found.missing * 1.000001, 1e11)]
    assert fit_of(more, around(len(more)), model, "Q4_K_M").fits
    if found.machines:
        like = [*hosts, *[max(hosts, key=lambda host: host.memory)] * found.machines]
        assert fit_of(like, around(len(like)), model, "Q4_K_M").fits
        if found.machines > 1:
            assert not fit_of(like[:-1], around(len(like) - 1), model, "Q4_K_M").fits


def test_laptop_by_its_kind_counts_with_memory(tmp_path: Path) -> None:
    file = tmp_path / "machines.json"
    file.write_text(json.dumps({"machines": [{"name": "desk", "device": "cpu", "region": "home"}]}))
    (desk,) = hosts_of(fleet_of(read_machines(file), 1 << 31, 1e6), 1e6)
    assert desk.memory == pytest.approx(0.8 * 16e9) and desk.bandwidth == pytest.approx(0.75 * 40e9)


def test_machines_other_memory_stays_free(tmp_path: Path) -> None:
    """`memory_gb` of a processor is for blocks, caches and computing; 0.8 of a card's is for blocks."""
    file = tmp_path / "machines.json"
    rows = [{"name": "desk", "device": "cpu", "memory_gb": 2}, {"name": "tower", "device": "rtx3090"}]
    file.write_text(json.dumps({"machines": [{**row, "region": "home"} for row in rows]}))
    (desk, tower), _ = hosts_of_file(file)
    memory = Memory(int(2e9) - MEMORY_SHARES.server, int(2e9))
    assert desk.computes and desk.memory == memory.free - memory.reserve
    assert not tower.computes and tower.memory == pytest.approx(0.8 * 24e9)


def test_weights_here_count_as_a_server_holds_them(tmp_path: Path) -> None:
    numbers = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, **numbers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = size_as_here(ModelSize("tiny", 2, 64, 4, 4, 16, 128, 100, True), str(tmp_path))
    held = max(block_sizes(tmp_path, "auto", "none", "auto").held)
    assert size.block_bytes("as it is") == pytest.approx(held)


def test_client_holds_mtp_head_and_per_layer_embeddings(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
    plain = size_by_config("x", config)
    drafting = size_by_config("x", config | {"num_nextn_predict_layers": 1})
    layered = size_by_config("x", config, Boundaries(64, 4, per_block=8))
    assert plain is not None and drafting is not None and layered is not None
    assert plain.client_bytes("bf16") == 2 * 2 * 1000 * 64
    assert drafting.client_bytes("bf16") - plain.client_bytes("bf16") == 2 * (plain.block_parameters + 2 * 64 * 64)
    assert layered.client_bytes("bf16") - plain.client_bytes("bf16") == 2 * 1000 * 4 * 8
    folder = save_with_head("qwen3_next", tmp_path)
    stored = {key: tensor.nbytes for key, tensor in load_file(folder / "model.safetensors").items()}
    size = size_by_config("x", json.loads((folder / "config.json").read_text()))
    assert size is not None and any(key.startswith("mtp.") for key in stored)
    ends = sum(count for key, count in stored.items() if not key.startswith("model.layers."))
    assert size_as_here(size, str(folder)).client_bytes("as it is") == ends


def test_sharing_blocks_need_one_machine_with_room() -> None:
    model = known_model("Qwen3-8B")
    assert model is not None
    shared = replace(model, boundaries=Boundaries(model.hidden, 36, undivided=(Span(20, 36),)))
    block = model.block_bytes("bf16")
    hosts = [MachineCapacity(f"m{number}", 12.5 * block, 1e11) for number in range(3)]
    assert fit_of(hosts, around(3), model, "bf16").fits
    found = fit_of(hosts, around(3), shared, "bf16")
    assert found.missing == pytest.approx(4 * block) and not found.machines
    assert fit_of([replace(hosts[0], memory=16.5 * block), *hosts[:2]], around(3), shared, "bf16").fits


def test_largest_weights_that_fit_and_what_is_missing() -> None:
    model = known_model("Llama-3.1-8B-Instruct")
    assert model is not None
    for gigabytes, weights in ((20, "bf16"), (10, "Q8_0"), (6, "Q4_K_M")):
        found = best_fit([MachineCapacity("one", gigabytes * 1e9, 1e11)], around(1), model)
        assert (found.fits, found.weights, found.machines) == (True, weights, 0)
        assert found.nbytes == pytest.approx(model.blocks * model.block_parameters * WEIGHTS[weights] / 8)
        # One client has its head to read as well, by an ordinary computer.
        head = model.vocab * model.hidden * WEIGHTS[weights] / 8 / (40e9 * 0.75)
        assert 1 / found.tokens_per_second == pytest.approx(found.nbytes / 1e11 + head + 0.009, rel=0.02)
        assert found.most_tokens_per_second == pytest.approx(1e11 / found.nbytes, rel=0.05)
    block = model.block_bytes("Q4_K_M")
    lacking = best_fit(
        [MachineCapacity("one", 10.5 * block, 1e11), MachineCapacity("two", 5.2 * block, 1e11)], around(2), model
    )
    assert (lacking.weights, lacking.machines) == ("Q4_K_M", 2)  # 17 blocks are missing, and the largest holds 10
    assert lacking.missing == pytest.approx(17 * block)
    one = best_fit([MachineCapacity(name, 15.6 * block, 1e11) for name in ("one", "two")], around(2), model)
    assert (one.missing, one.machines) == (pytest.approx(2 * block), 1)
    one = best_fit([MachineCapacity("one", 31.5 * block, 1e11)], around(1), model)
    assert (one.missing, one.machines) == (pytest.approx(block), 1)
    nothing = best_fit([MachineCapacity("one", 0.5 * block, 1e11)], around(1), model)
    assert (nothing.machines, nothing.missing) == (0, pytest.approx(32 * block))
    assert best_fit([], around(0), model).machines == 0


def test_of_a_small_model_the_clients_part_counts() -> None:
    """As large a part of a token as the blocks; what the client is known to take, or to read, stands instead."""
    model = known_model("SmolLM2-135M-Instruct")
    assert model is not None
    slow = [MachineCapacity("one", 1e9, 1e10)]
    blocks, head = (nbytes / 1e10 for nbytes in (model.blocks * model.active_bytes("Q8_0"), model.head_bytes("Q8_0")))
    handling, own = COST.handling_seconds, MACHINES.client_seconds

    def seconds(fleet: Fleet) -> float:
        return 1 / fit_of(slow, fleet, model, "Q8_0").tokens_per_second

    assert seconds(around(1)) == pytest.approx(blocks + handling + head + own)
    quick = replace(around(1), client_bandwidth=1e11)
    assert seconds(quick) == pytest.approx(blocks + handling + head / 10 + own)
    assert seconds(replace(quick, client_seconds=0.5)) == pytest.approx(blocks + handling + 0.5)
    found = fit_of(slow, around(1), model, "Q8_0")
    assert found.most_tokens_per_second == pytest.approx(1 / blocks)  # clients elsewhere have heads of their own


@pytest.mark.parametrize("gigabytes", [0.7, 2, 8, 24, 96])
def test_this_machine_holds_what_its_server_would_choose(gigabytes: float) -> None:
    memory = Memory(int(gigabytes * 1e9), int(1.5 * gigabytes * 1e9))
    here = MachineCapacity("here", memory.free - memory.reserve, 1e10, computes=True)
    for model in known_models():
        config = {"num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim}
        for weights in WEIGHTS:
            block, cache = model.block_bytes(weights), cache_bytes_per_block(config, 4)
            try:
                count = blocks_that_fit(
                    memory, int(block), model.blocks, cache_bytes=cache, hidden_size=model.hidden
                ).count
            except MachineError:
                count = 0
            assert min(model.blocks, here.holds(model, weights)) == count, model.name


def test_what_others_use_is_told_with_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "this_machine", lambda: MachineCapacity("this machine", 8e9, 1e10, computes=True))
    for others in (0.0, 0.6):
        monkeypatch.setattr(MachineMeter, "use", lambda _, others=others: MachineUse(others))
        said = f"; {fit.here_now()[1]}"
        assert fit.largest_here().endswith(said if others else "(petalnode fit has others)"), others
        assert ("60%" in said) == bool(others)
