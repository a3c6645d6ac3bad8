"""Finite inputs on which honest servers differ by more than the tolerance: a tie between two experts, values that one
processor takes for zero, values next to the smallest of a codec. Whoever chooses such inputs convicts nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from petalnode.node.models import compute_manifest
from petalnode.node.models.folder import ModelFolder, open_folder
from petalnode.node.trust.bundle import batch_bundle, session_bundle
from petalnode.node.trust.receipt_log import SessionLog
from petalnode.node.verification import recomputation
from petalnode.node.verification.evidence_check import check_evidence
from petalnode.node.verification.judging import (
    Distance,
    Spread,
    distance,
    judge_distance,
    judge_kept,
    judge_steady,
    spread_of,
)
from petalnode.node.verification.noise import Noise
from petalnode.node.verification.observed import Observed, observed_session
from petalnode.node.verification.recomputation import (
    RECOMPUTATION,
    Recomputation,
    RecordedStep,
    SessionQuestion,
    last_of,
)
from petalnode.node.verification.tolerances import Kind, Tolerance, find_tolerance, noise_of
from petalnode.node.verification.verdicts import Compared, Judge
from petalnode.protocols.ids import Span
from petalnode.protocols.tensors import decode, encode
from tests.attacks.forger import ATTACKER, hidden
from tests.attacks.kernels import OtherKernels, decisive, subnormals_are_zero
from tests.signing_server import SigningServer, Spoil, probed, spoiled
from tests.tiny_models import save_tiny

SPAN = Span(1, 4)
TOLERANCE = Tolerance(ok_worst=0.02, ok_mean=0.01, faulty_worst=0.04, faulty_mean=0.02)


@pytest.fixture(autouse=True)
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an attacker never has; here it makes every run the same."""
    monkeypatch.setattr(recomputation, "SystemRandom", lambda: Random(3))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("experts")
    save_tiny("mixtral", path)
    return open_folder(path, "tiny-experts")


def serving(folder: ModelFolder, dtype: str = "float32", quant: str = "none") -> SigningServer:
    return SigningServer(folder.path, compute_manifest(folder).version, SPAN, dtype=dtype, quant=quant)


def plainly(server: SigningServer, folder: ModelFolder, log: SessionLog) -> str:
    """The verdict without a look at roundings."""
    seen = observed_session(log, "cpu")
    assert seen is not None and isinstance(seen.question, SessionQuestion)
    (answer,) = Recomputation(folder.path, server.dtype, server.quant).answer([seen.question])
    return judge_distance(distance(seen.claimed[-1], last_of(answer)), find_tolerance(seen.kind("cpu"))).result


def test_a_tie_between_experts_convicts_nobody(experts: ModelFolder) -> None:
    server = serving(experts)
    tie = decisive(server.blocks, hidden(1, seed=1), hidden(1, seed=2))
    with OtherKernels():
        log = server.session([(0, tie, ())])
    assert plainly(server, experts, log) == "faulty"  # or nothing is tested here
    assert probed(experts, log).verdict == "inconclusive"
    outcome = check_evidence(session_bundle(ATTACKER, log, 0), experts)
    assert outcome.inconclusive and not outcome.proven, outcome
    with OtherKernels():
        batch = server.work(tie)
    outcome = check_evidence(batch_bundle(ATTACKER, batch), experts)
    assert outcome.inconclusive and not outcome.proven, outcome


def test_nobody_hides_behind_a_tie(experts: ModelFolder) -> None:
    """A liar whose accomplice before it sends a tie is caught by the other tokens."""
    server = serving(experts)
    tie = decisive(server.blocks, hidden(1, seed=1), hidden(1, seed=2))

    def late(output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[:, :1], spoiled(output[:, 1:])], dim=1)

    # With one row for each token, no token attends to the one that is tied.
    rows = torch.cat([tie, *(hidden(1, seed=seed) for seed in range(3, 12))])
    log = server.session([(0, rows, ())], spoil=lambda output: late(output.transpose(0, 1)).transpose(0, 1))
    assert probed(experts, log).verdict == "faulty"
    assert check_evidence(session_bundle(ATTACKER, log, 0), experts).proven


@pytest.mark.parametrize("seed", range(4))
def test_experts_in_bfloat16_are_not_convicted(experts: ModelFolder, seed: int) -> None:
    """Ties are common there; no attacker is needed."""
    server = serving(experts, "bfloat16")
    with OtherKernels():
        log = server.session([(0, hidden(24, seed=seed), ()), (24, hidden(1, seed=90 + seed), ())])
    assert probed(experts, log).verdict != "faulty"
    assert not check_evidence(session_bundle(ATTACKER, log, 1), experts).proven


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_taken_for_zero_convict_nobody(folder: ModelFolder, dtype: str) -> None:
    server, asked = serving(folder, dtype), 1e-40 * hidden(3)
    with subnormals_are_zero() as possible:
        if not possible:
            pytest.skip("this processor cannot take them for zero")
        log = server.session([(0, asked, ())])
    assert plainly(server, folder, log) == "faulty"
    assert probed(folder, log).verdict == "inconclusive"
    outcome = check_evidence(session_bundle(ATTACKER, log, 0), folder)
    assert outcome.inconclusive and not outcome.proven, outcome


def test_gradients_taken_for_zero_convict_nobody(folder: ModelFolder) -> None:
    server, gradient = serving(folder), 1e-40 * hidden(3, seed=1)
    with subnormals_are_zero() as possible:
        if not possible:
            pytest.skip("this processor cannot take them for zero")
        batch = server.work(hidden(3), gradient)
    outcome = check_evidence(batch_bundle(ATTACKER, batch), folder)
    assert outcome.inconclusive and not outcome.proven, outcome


def test_values_that_codec_rounds_to_nothing_convict_nobody() -> None:
    right = 1e-7 * hidden(3)
    claimed = (decode(*encode(right, "float16")),)
    seen = Observed("", SPAN, "float32", "none", SessionQuestion(SPAN, ()), claimed, codec="float16")
    compared = Compared(seen, right, tolerance=find_tolerance(seen.kind("cpu")))
    judge = Judge(Path("nowhere"))
    assert judge.verdict(compared).verdict == "faulty"
    assert judge.verdict(replace(compared, perturbed=(right,))).verdict == "inconclusive"


@pytest.mark.parametrize("value", [1e9, 1e18, 1e30, 3e38])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_huge_values_convict_nobody(folder: ModelFolder, value: float, dtype: str) -> None:
    server = serving(folder, dtype)
    asked = hidden(3)
    asked[0, 1] *= value / asked[0, 1].abs().max()
    with OtherKernels():
        log = server.session([(0, asked, ())])
    assert probed(folder, log).verdict != "faulty"
    assert not check_evidence(session_bundle(ATTACKER, log, 0), folder).proven


# --- what a cheat gains


def scaled_noise(size: float) -> Spoil:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7))
        return tensor + size * noise * tensor.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)

    return spoil


CAUGHT = [("float32", "none", 2e-4), ("float32", "int8", 0.01), ("bfloat16", "none", 0.09), ("bfloat16", "int8", 0.12)]
"""Noise a little above what is proved without a look at roundings."""


@pytest.mark.parametrize(("dtype", "quant", "size"), CAUGHT)
def test_ordinary_answers_allow_no_more_than_the_tolerance(
    folder: ModelFolder, dtype: str, quant: str, size: float
) -> None:
    server = serving(folder, dtype, quant)
    for seed in range(3):
        log = server.session([(0, hidden(24, seed=seed), ())], spoil=scaled_noise(size))
        assert plainly(server, folder, log) == "faulty"
        assert probed(folder, log).verdict == "faulty"
        assert check_evidence(session_bundle(ATTACKER, log, 0), folder).proven


@pytest.mark.parametrize(("dtype", "quant"), [kind[:2] for kind in CAUGHT])
def test_ordinary_answers_do_not_depend_on_roundings(folder: ModelFolder, dtype: str, quant: str) -> None:
    kind = Kind(dtype, quant, blocks=len(SPAN))
    tolerance = find_tolerance(kind)
    assert tolerance is not None
    question = SessionQuestion(SPAN, (RecordedStep(0, hidden(24, seed=5)),))
    truth = Recomputation(folder.path, dtype, quant)
    (right,) = map(last_of, truth.answer([question]))
    spread = spread_of(right, [last_of(one) for one in truth.perturbed([question], noise_of(kind), seed=1)[0]])
    assert bool(spread.steady(tolerance).all())
    assert float(spread.most.square().mean().sqrt()) < 1.5 * tolerance.faulty_mean


# --- the rules


def spread(*most: float) -> Spread:
    changed = torch.tensor(most, dtype=torch.float64)
    return Spread(changed)


def judged(errors: Sequence[float], changes: Sequence[float]) -> str:
    right = hidden(len(errors))
    claimed = right.clone()
    for index, error in enumerate(errors):
        claimed[0, index] *= 1 + error
    return judge_steady(claimed, right, TOLERANCE, spread(*changes)).result


def test_tokens_that_depend_on_roundings_do_not_count() -> None:
    assert judged([0.5, 0.0, 0.0], [0.5, 0.0, 0.0]) == "inconclusive"
    assert judged([0.5, 0.5, 0.0], [0.5, 0.0, 0.0]) == "faulty"
    assert judged([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]) == "inconclusive"


def test_the_mean_is_compared_with_what_noise_makes() -> None:
    assert judged([0.024] * 3, [0.0] * 3) == "faulty"
    assert judged([0.012] * 3, [0.026] * 3) == "inconclusive"
    assert judged([0.024] * 3, [0.022] * 3) == "faulty"
    assert judged([0.045] * 3, [0.026] * 3) == "faulty"  # whatever the mean may be


def test_infinite_noise_leaves_nothing_to_judge() -> None:
    right = hidden(2)
    found = spread_of(right, [right, right * float("nan")])
    assert not found.steady(TOLERANCE).any()


@pytest.mark.parametrize(("worst", "result"), [(0.0, "faulty"), (0.03, "inconclusive")])
def test_kept_tensors_gradients_by_rounding_decide_nothing(worst: float, result: str) -> None:
    found, noisy = {"deep prompts": Distance(0.5, 0.5, 3)}, {"deep prompts": Distance(worst, worst, 3)}
    assert judge_kept(found, TOLERANCE, [noisy])[0].result == result


def test_ties_of_two_experts_are_decided_both_ways() -> None:
    for one in range(16):
        for other in range(one):
            scores = torch.full((1, 16), -9.0)
            scores[0, [one, other]] = 1.0
            chosen = set()
            for pair in range(RECOMPUTATION.pairs):
                for sign in (1, -1):
                    with Noise(1e-3, 4, 11 + pair, pair, sign):
                        values, indices = torch.topk(scores, 1, dim=-1)
                    assert values.item() == 1.0  # the score itself has no noise
                    chosen.add(indices.item())
            assert chosen == {one, other}
