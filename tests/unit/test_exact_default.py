"""When a server computes to the bit although nobody told it to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from petalnode.node.blocks.kernels.library import Library
from petalnode.node.models.folder import ModelFolder
from petalnode.node.models.quantisation import Numerics
from petalnode.node.server.lifecycle.exactness import KINDS, ExactCost, cost_of, exact_unasked, keep_cost
from petalnode.node.server.lifecycle.options import ServerOptions
from petalnode.node.server.lifecycle.speed import BlockSpeed
from petalnode.node.testing.memory_servers import memory_swarm
from tests.tiny_models import save_tiny

CHEAP = {kind: BlockSpeed(1.04 if kind.exact else 1.0, 0.6 if kind.exact else 1.0) for kind in KINDS}
ASKED = ServerOptions("model", kernels="auto", exact_if_cheap=True)


pytestmark = pytest.mark.usefixtures("cache")


def folder(**config: Any) -> ModelFolder:
    return ModelFolder("model", Path("/model"), config, 2, 64)


def test_the_weights_that_cost_the_most_count() -> None:
    dear = CHEAP | {Numerics("nf4", exact=True): BlockSpeed(0.9, 1.06)}
    assert cost_of(CHEAP) == ExactCost(1.04, 0.6)
    assert cost_of(dear) == ExactCost(1.04, 1.06)
    assert cost_of({kind: CHEAP[kind] for kind in KINDS[1:]}) is None


@pytest.mark.parametrize(("step", "prompt", "small"), [(1.05, 1.05, True), (1.051, 0.5, False), (0.9, 1.6, False)])
def test_neither_steps_nor_prompts_may_cost_much(step: float, prompt: float, small: bool) -> None:
    assert ExactCost(step, prompt).is_small is small


def test_nothing_is_chosen_where_nothing_was_measured() -> None:
    assert exact_unasked(ASKED, folder()) == ASKED
    keep_cost(CHEAP | {KINDS[1]: BlockSpeed(1.1, 0.6)})
    assert exact_unasked(ASKED, folder()) == ASKED
    keep_cost(CHEAP)
    chosen = exact_unasked(ASKED, folder())
    assert chosen.exact and str(chosen.numerics) == "none/exact-1" and chosen.dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"exact_if_cheap": False}, {}),
        ({"kernels": "torch"}, {}),
        ({"dtype": "bfloat16"}, {}),
        ({"devices": ("cuda:0",)}, {}),
        ({"devices": ("cpu", "cuda:0")}, {}),
        ({}, {"dtype": "bfloat16"}),
        ({}, {"torch_dtype": "float16"}),
        ({}, {"text_config": {"dtype": "bfloat16"}}),
    ],
)
def test_what_was_asked_for_stays(changes: dict[str, Any], config: dict[str, Any]) -> None:
    keep_cost(CHEAP)
    asked = replace(ASKED, **changes)
    assert exact_unasked(asked, folder(**config)) == asked
    assert exact_unasked(replace(ASKED, dtype="float32"), folder(dtype="bfloat16")).exact


def test_no_stranger_keeps_servers_from_being_exact(tmp_path: Path, kernels: Library) -> None:
    keep_cost(CHEAP)
    llama, unknown = save_tiny("llama", tmp_path / "llama"), save_tiny("bloom", tmp_path / "bloom")
    options: dict[str, Any] = {"exact_if_cheap": True, "kernels": "auto"}
    with memory_swarm() as swarm:
        for stranger in ("3:6", "0:6"):
            assert swarm.start(llama, stranger).ready["quantisation"] == "none"
            assert swarm.start(llama, "0:3", **options).ready["quantisation"] == "none/exact-1"
        server = swarm.start(unknown, "0:3", **options)
        assert server.ready["quantisation"] == "none" and "not exact to the bit" in server.errors
