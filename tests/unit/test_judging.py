"""Judging: what is called right, wrong and neither, without a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from petalnode.crypto.receipts import Receipt
from petalnode.node.errors import ModelError
from petalnode.node.trust.receipt_log import LoggedBatch
from petalnode.node.verification.judging import (
    distance,
    judge_distance,
    judge_kept,
    kept_distances,
    no_padding,
    worst_judgement,
)
from petalnode.node.verification.observed import Observed, observed_batch
from petalnode.node.verification.recomputation import Recomputation, RecordedStep, SessionQuestion, joined
from petalnode.node.verification.tolerances import Calibration, Kind, Tolerance, find_tolerance, tolerance_of
from petalnode.node.verification.verdicts import Compared, Judge, Verdict, worst_of
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from petalnode.protocols.tensors import encode
from petalnode.protocols.training import FORWARD, MicroBatch
from tests.tiny_models import HIDDEN, save_tiny

TOLERANCE = Tolerance(ok_worst=0.02, ok_mean=0.01, faulty_worst=0.04, faulty_mean=0.02)


def noisy(truth: torch.Tensor, share: float, seed: int = 0) -> torch.Tensor:
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(seed))
    return truth + share * noise * truth.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)


def hidden(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


JUDGE = Judge(Path("nowhere"))
"""Of what is compared already: it needs no model."""


def seen(
    *claimed: torch.Tensor, quantisation: str = "none", codec: str = "none", counts: torch.Tensor | None = None
) -> Observed:
    question = SessionQuestion(Span(2, 4), ())
    return Observed("peer", Span(2, 4), "float32", quantisation, question, claimed, "cpu", codec, counts=counts)


def judge(
    claimed: torch.Tensor, truth: torch.Tensor, tolerance: Tolerance | None, counts: torch.Tensor | None = None
) -> Verdict:
    observed = seen(claimed, counts=counts)
    return JUDGE.verdict(Compared(observed, observed.judged(truth), tolerance=tolerance))


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


def test_tiny_token_is_measured_by_its_neighbours() -> None:
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
    assert judge(claimed, truth, TOLERANCE).verdict == "faulty"


@pytest.mark.parametrize(
    ("share", "result"), [(0.0, "ok"), (0.009, "ok"), (0.015, "inconclusive"), (0.025, "faulty"), (0.5, "faulty")]
)
def test_verdicts(share: float, result: str) -> None:
    truth = hidden(1, 20, 64)
    judged = judge(noisy(truth, share), truth, TOLERANCE)
    assert judged.verdict == result
    assert judged.error is not None and judged.tolerance is not None
    assert (judged.error > judged.tolerance) == (result != "ok")
    assert judged.reason


def test_other_shape_is_wrong_and_unknown_kind_neither() -> None:
    assert judge(hidden(1, 3, 8), hidden(1, 4, 8), TOLERANCE).verdict == "faulty"
    assert judge(hidden(1, 3, 8), hidden(1, 3, 8, seed=1), None).verdict == "inconclusive"


def kept(seed: int = 0) -> dict[str, torch.Tensor]:
    """Gradients of deep prompts of three blocks, and of LoRA in two."""
    names = [f"{block}.self_attn.q_proj.{part}" for block in (3, 4) for part in ("lora_A", "lora_B")]
    return {"prompts": hidden(3, 1, 4, 16, seed=seed)} | {name: hidden(8, 16, seed=seed + 1) for name in names}


def test_kept_gradients_are_judged_by_kind_and_block() -> None:
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


def test_gradient_that_is_zero_has_to_be_zero() -> None:
    """That of LoRA's A, while B still is zero."""
    truth = kept() | {f"{block}.self_attn.q_proj.lora_A": torch.zeros(8, 16) for block in (3, 4)}
    assert worst_judgement(judge_kept(kept_distances(truth, truth), TOLERANCE)).result == "ok"
    assert worst_judgement(judge_kept(kept_distances(kept(), truth), TOLERANCE)).result == "faulty"


def test_gradients_of_unkept_things_are_no_answer() -> None:
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


def test_tolerance_grows_with_longer_span_and_never_shrinks() -> None:
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
    both = replace(kind, server_device="cpu+cuda")
    assert find_tolerance(both, [row]) is None  # nobody has measured its processor's part
    assert find_tolerance(both, [row, wider]) == tolerance_of(wider, 8)
    coarse = find_tolerance(replace(kind, codec="int8-block64"), [row])
    assert coarse is not None and coarse.ok_mean > found.ok_mean


def test_the_shipped_table_can_be_read() -> None:
    exact = find_tolerance(Kind("float32", "none", blocks=8))
    assert exact is not None and exact.faulty_worst < 1e-3


def test_padding_says_nothing_of_a_server() -> None:
    truth = hidden(2, 6, 64)
    counts, tolerance = no_padding((0, 3), 2, 0, 6), find_tolerance(Kind("float32", "none"))
    assert counts.tolist() == [[True] * 6, [False] * 3 + [True] * 3]
    claimed = truth.clone()
    claimed[1, :3] = 7.0
    assert judge(claimed, truth, tolerance, counts).verdict == "ok"
    assert judge(claimed, truth, tolerance).verdict == "faulty"
    claimed[1, 3] = 7.0
    assert judge(claimed, truth, tolerance, counts).verdict == "faulty"
    # Tokens before those of the answer are not judged, either.
    longer = torch.cat([hidden(2, 4, 64, seed=1), truth], dim=1)
    assert seen(truth, counts=counts).judged(longer).equal(truth[counts].unsqueeze(0))


def test_wrong_shape_is_wrong_whatever_is_padding() -> None:
    truth = hidden(2, 6, 64)
    judged = judge(truth[:, :5], truth, TOLERANCE, no_padding((0, 3), 2, 0, 6))
    assert judged.verdict == "faulty" and judged.fields()["error"] == 1e30


@pytest.mark.parametrize(
    ("mask", "counted"), [(b"\x7c", [[False, True, True], [True] * 3]), (b"\0", None), (b"", None)]
)
def test_padding_of_a_batch_is_not_judged(mask: bytes, counted: list[list[bool]] | None) -> None:
    tensor, payload = encode(hidden(2, 3, 8), "none")
    request = wire.BatchRequest(sequence=1, tensors=[tensor], mask=mask)
    receipt = Receipt(1, b"", (2, 4), "float32", "none", "client", b"", b"", 1, b"", b"", b"", b"", 0)
    found = observed_batch(LoggedBatch("peer", FORWARD.id, receipt, MicroBatch(request, (payload,)), (payload,)))
    assert (None if found.counts is None else found.counts.tolist()) == counted
    assert found.judged(found.claimed[0]).shape == ((2, 3, 8) if counted is None else (1, 5, 8))


def test_padding_alone_is_judged_whole() -> None:
    truth = hidden(1, 3, 64)
    counts = no_padding((9,), 1, 2, 3)
    assert judge(truth, truth, TOLERANCE, counts).verdict == "ok"
    assert judge(2 * truth, truth, TOLERANCE, counts).verdict == "faulty"


# --- verdicts on servers


def test_verdict_says_who_what_and_by_how_much() -> None:
    truth = hidden(1, 20, 64)
    observed = seen(noisy(truth, 0.5)[:, :15], noisy(truth, 0.5)[:, 15:])
    found = JUDGE.verdict(Compared(observed, truth, tolerance=TOLERANCE))
    assert (found.peer_id, found.blocks, found.verdict, found.kind) == ("peer", Span(2, 4), "faulty", "forward")
    assert found.error == pytest.approx(0.5, rel=1e-2) and found.tolerance == TOLERANCE.faulty_mean
    assert "its answer is off by 0.5" in found.reason and found.requests == 2
    fields = replace(found, evidence=Path("file")).fields()
    assert fields["blocks"] == [2, 4] and fields["evidence"] == "file" and found.fields()["evidence"] is None
    unasked = replace(found, error=None, tolerance=None).fields()
    assert unasked["error"] is None and unasked["tolerance"] is None
    assert JUDGE.verdict(Compared(seen(truth), truth, tolerance=TOLERANCE)).verdict == "ok"
    assert JUDGE.verdict(Compared(seen(truth), truth)).verdict == "inconclusive"


def test_an_answer_of_another_length_is_infinitely_far() -> None:
    truth = hidden(1, 20, 64)
    compared = Compared(seen(truth[:, :19]), truth, tolerance=TOLERANCE, perturbed=(truth,))
    found = JUDGE.verdict(compared)
    assert found.verdict == "faulty" and found.fields()["error"] == 1e30 and compared.steady is None


def test_the_worst_verdict_on_a_server_is_kept() -> None:
    def verdict(result: str, error: float, tolerance: float, requests: int = 1) -> Verdict:
        return Verdict("peer", Span(2, 3), result, result, error, tolerance, requests=requests)  # type: ignore[arg-type]

    ok, wrong = verdict("ok", 0.9, 1.0), verdict("faulty", 0.2, 0.1, 3)
    little, none = verdict("faulty", 0.5, 0.4), replace(verdict("faulty", 0.0, 0.0), error=None, tolerance=None)
    found = worst_of([none, ok, wrong, little], Span(0, 6))
    assert found == replace(wrong, blocks=Span(0, 6), requests=6)
    unsure = replace(verdict("inconclusive", 0.0, 0.0), error=None, tolerance=None)
    assert worst_of([ok, unsure], Span(0, 6)).verdict == "inconclusive"
    assert worst_of([verdict("ok", 0.1, 1.0), ok], Span(0, 6)).error == 0.9
    assert worst_of([verdict("ok", 0.3, 0.0), verdict("ok", 0.2, 0.5)], Span(0, 6)).error == 0.2


def coarser() -> tuple[torch.Tensor, torch.Tensor]:
    """What is right, and what coarser weights make of it."""
    truth = hidden(1, 20, 64)
    return truth, noisy(truth, 0.015, seed=3)


def test_coarser_weights_than_declared_are_named() -> None:
    truth, other = coarser()
    compared = Compared(seen(other), truth, {"int8": other}, tolerance=TOLERANCE)
    found = JUDGE.verdict(compared)
    assert found.verdict == "faulty" and found.error == compared.found.mean
    assert "what int8 weights give (1.00 of the way), and it declared float32 weights" in found.reason
    declared = seen(other, quantisation="int8")
    reason = JUDGE.verdict(Compared(declared, truth, {"nf4": other}, tolerance=TOLERANCE)).reason
    assert "what nf4 weights give" in reason and "declared int8 weights" in reason
    assert JUDGE.verdict(Compared(seen(other), truth, {"int8": other})).verdict == "inconclusive"
    assert JUDGE.verdict(Compared(seen(truth), truth, {"int8": other}, tolerance=TOLERANCE)).verdict == "ok"


def test_what_noise_makes_as_well_is_no_substitution() -> None:
    truth, other = coarser()
    options = {"others": {"int8": other}, "tolerance": TOLERANCE}
    assert JUDGE.verdict(Compared(seen(other), truth, perturbed=(truth, truth), **options)).verdict == "faulty"
    assert JUDGE.verdict(Compared(seen(other), truth, perturbed=(truth, other), **options)).verdict != "faulty"
    wild = hidden(1, 20, 64, seed=9)
    nowhere = Compared(seen(other), truth, perturbed=(wild,), **options)
    assert not bool(nowhere.steady.any()) and JUDGE.verdict(nowhere).verdict != "faulty"
    # Of tokens that depend on roundings nothing is known: neither that they are coarser, nor that they are not.
    partly = truth.clone()
    partly[0, :8] = wild[0, :8]
    claimed = other.clone()
    claimed[0, :8] = hidden(8, 64, seed=10)
    assert JUDGE.verdict(Compared(seen(claimed), truth, perturbed=(partly,), **options)).verdict == "faulty"


def test_tokens_by_rounding_are_right_either_way() -> None:
    truth = hidden(1, 20, 64)
    claimed, unsteady = noisy(truth, 0.5), truth.clone()
    unsteady[0, :8] = noisy(truth, 0.5, seed=1)[0, :8]
    observed = seen(claimed[:, :8], claimed[:, 8:])
    compared = Compared(observed, truth, tolerance=TOLERANCE, perturbed=(unsteady,))
    first, second = compared.steps
    assert (first.worst, first.tokens) == (0.0, 8) and second.mean == pytest.approx(0.5, rel=1e-2)
    first, second = Compared(observed, truth, tolerance=TOLERANCE).steps
    assert first.mean == pytest.approx(0.5, rel=1e-2)


@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": "float8"},
        {"quantisation": "int3"},
        {"quantisation": "int3/exact-1"},
        {"dtype": "bfloat16", "quantisation": "none/cache=int8"},
        {"dtype": "bfloat16", "quantisation": "int8/activations=int8"},
    ],
)
def test_an_unknown_kind_hides_no_other_server(kind: dict[str, str], tmp_path: Path) -> None:
    folder, blocks = save_tiny("llama", tmp_path / "tiny"), Span(0, 1)
    question = SessionQuestion(blocks, (RecordedStep(0, torch.randn(1, 5, HIDDEN)),))
    (answer,) = Recomputation(folder, "float32", "none").answer([question])
    honest = Observed("honest", blocks, "float32", "none", question, (joined(answer),), "cpu")
    liar = replace(honest, peer_id="liar", claimed=(1.3 * joined(answer),))
    verdicts = Judge(folder).verdicts([replace(honest, **kind), honest, liar])
    assert [verdict.verdict for verdict in verdicts] == ["inconclusive", "ok", "faulty"]
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError):
        Judge(folder).verdicts([honest])
