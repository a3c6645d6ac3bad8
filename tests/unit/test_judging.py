"""Judging: what is called right, wrong and neither, without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.verification.judging import (
    distance,
    judge,
    judge_answer,
    judge_distance,
    judge_kept,
    kept_distances,
    worst_judgement,
)
from petalnode.node.verification.tolerances import Calibration, Kind, Tolerance, find_tolerance, tolerance_of

TOLERANCE = Tolerance(ok_worst=0.02, ok_mean=0.01, faulty_worst=0.04, faulty_mean=0.02)


def noisy(truth: torch.Tensor, share: float, seed: int = 0) -> torch.Tensor:
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(seed))
    return truth + share * noise * truth.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)


def hidden(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_distance_is_relative_to_each_token() -> None:
    truth = hidden(2, 5, 64) * torch.tensor([1.0, 10, 100, 1000, 1]).view(1, 5, 1)
    found = distance(noisy(truth, 0.03), truth)
    assert found.worst == pytest.approx(0.03, rel=1e-3)
    assert found.mean == pytest.approx(0.03, rel=1e-3)
    assert found.tokens == 10


def test_one_wrong_token_shows_in_the_worst() -> None:
    truth = hidden(1, 100, 64)
    claimed = truth.clone()
    claimed[0, 7] = noisy(truth, 0.5)[0, 7]
    found = distance(claimed, truth)
    assert found.worst == pytest.approx(0.5, rel=1e-3) and found.mean == pytest.approx(0.05, rel=1e-3)


def test_a_token_of_next_to_nothing_is_measured_by_its_neighbours() -> None:
    truth = hidden(1, 9, 64)
    truth[0, 4] *= 1e-9
    claimed = truth.clone()
    claimed[0, 4] += 1e-6 * hidden(64)
    assert distance(claimed, truth).worst < 1e-4
    assert distance(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)).worst == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_infinitely_far(value: float) -> None:
    truth = hidden(1, 3, 8)
    claimed = truth.clone()
    claimed[0, 1, 2] = value
    assert judge(claimed, truth, TOLERANCE).result == "faulty"


@pytest.mark.parametrize(
    ("share", "result"), [(0.0, "ok"), (0.009, "ok"), (0.015, "inconclusive"), (0.025, "faulty"), (0.5, "faulty")]
)
def test_verdicts(share: float, result: str) -> None:
    truth = hidden(1, 20, 64)
    judged = judge(noisy(truth, share), truth, TOLERANCE)
    assert judged.result == result
    assert (judged.error > judged.tolerance) == (result != "ok")
    assert judged.reason


def test_another_shape_is_wrong_and_an_unknown_kind_is_neither() -> None:
    assert judge(hidden(1, 3, 8), hidden(1, 4, 8), TOLERANCE).result == "faulty"
    assert judge(hidden(1, 3, 8), hidden(1, 3, 8, seed=1), None).result == "inconclusive"


def kept(seed: int = 0) -> dict[str, torch.Tensor]:
    """Gradients of deep prompts of three blocks, and of LoRA in two."""
    names = [f"{block}.self_attn.q_proj.{part}" for block in (3, 4) for part in ("lora_A", "lora_B")]
    return {"prompts": hidden(3, 1, 4, 16, seed=seed)} | {name: hidden(8, 16, seed=seed + 1) for name in names}


def test_gradients_of_what_was_kept_are_judged_by_kind_and_each_block_s_prompts_alone() -> None:
    truth = kept()
    right = kept_distances(truth, truth)
    assert {what: gradient.tokens for what, gradient in right.items()} == {
        "deep prompts": 3,
        "LoRA's A": 2,
        "LoRA's B": 2,
    }
    assert worst_judgement(judge_kept(right, TOLERANCE)).result == "ok"
    for name, what in (("prompts", "deep prompts"), ("4.self_attn.q_proj.lora_B", "LoRA's B")):
        claimed = kept()
        (claimed[name][1] if name == "prompts" else claimed[name]).mul_(1.05)
        judged = worst_judgement(judge_kept(kept_distances(claimed, truth), TOLERANCE))
        assert judged.result == "faulty" and what in judged.reason
        assert judged.error == pytest.approx(0.05, rel=1e-2) or judged.error < 0.05  # over all, or the worst


def test_a_gradient_that_is_zero_has_to_be_zero() -> None:
    """That of LoRA's A, while B still is zero."""
    truth = kept() | {f"{block}.self_attn.q_proj.lora_A": torch.zeros(8, 16) for block in (3, 4)}
    assert worst_judgement(judge_kept(kept_distances(truth, truth), TOLERANCE)).result == "ok"
    assert worst_judgement(judge_kept(kept_distances(kept(), truth), TOLERANCE)).result == "faulty"


def test_gradients_of_something_else_than_was_kept_are_no_answer() -> None:
    with pytest.raises(ValueError, match="other tensors"):
        kept_distances({"prompts": hidden(3, 1, 4, 8)}, {"prompts": hidden(3, 1, 4, 16)})


@given(st.floats(0, 1), st.floats(0, 1))
def test_more_error_is_never_judged_better(one: float, other: float) -> None:
    order = ("ok", "inconclusive", "faulty")
    truth = hidden(1, 4, 16)
    results = [
        judge_distance(distance(noisy(truth, amount), truth), TOLERANCE).result for amount in sorted((one, other))
    ]
    assert order.index(results[0]) <= order.index(results[1])


def test_the_tolerance_grows_with_a_longer_span_and_never_shrinks() -> None:
    row = Calibration("float32", "none", "cpu", "cuda", "forward", 8, 1e-3, 1e-4, 5, "")
    assert tolerance_of(row, 32).ok_mean == pytest.approx(2 * tolerance_of(row, 8).ok_mean)
    assert tolerance_of(row, 1) == tolerance_of(row, 8)
    kind = Kind("float32", "none", blocks=8, server_device="cuda")
    found = find_tolerance(kind, [row])
    assert found == tolerance_of(row, 8)
    assert find_tolerance(replace(kind, quantisation="int8"), [row]) is None
    assert find_tolerance(replace(kind, server_device="cpu"), [row]) is None
    assert find_tolerance(replace(kind, direction="backward"), [row]) is None
    wider = replace(row, own_device="cpu", worst=1.0)
    assert find_tolerance(replace(kind, server_device=""), [row, wider]) == tolerance_of(wider, 8)
    assert find_tolerance(replace(kind, server_device="", own_device="mps"), [row, wider]) is None
    coarse = find_tolerance(replace(kind, codec="int8-block64"), [row])
    assert coarse is not None and coarse.ok_mean > found.ok_mean


def test_the_shipped_table_can_be_read() -> None:
    exact = find_tolerance(Kind("float32", "none", blocks=8))
    assert exact is not None and exact.faulty_worst < 1e-3


def test_padding_says_nothing_of_a_server() -> None:
    truth = hidden(2, 6, 64)
    counts = torch.arange(6) >= torch.tensor([[0], [3]])
    claimed = truth.clone()
    claimed[1, :3] = 7.0
    assert judge_answer(Kind("float32", "none"), claimed, truth, counts).result == "ok"
    assert judge_answer(Kind("float32", "none"), claimed, truth).result == "faulty"
    claimed[1, 3] = 7.0
    assert judge_answer(Kind("float32", "none"), claimed, truth, counts).result == "faulty"
