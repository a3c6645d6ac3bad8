"""Finite values that are too large for the dtype of an honest server, or for what its answer travels as."""

from __future__ import annotations

import pytest
import torch

from petalnode.node.blocks.batch_request import run_request, unpack_request
from petalnode.node.blocks.passes import SpanPasses, run_through
from petalnode.node.models.folder import ModelFolder
from petalnode.node.server.steps import ComputeSession, QueuedStep, StepInput, StepOutput, StepRunner
from petalnode.node.trust.bundle import batch_bundle, session_bundle
from petalnode.node.verification.evidence_check import check_evidence
from petalnode.node.verification.judging import distance, judge_distance, kept_distances
from petalnode.node.verification.tolerances import Kind, Tolerance, find_tolerance
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import Refusal
from petalnode.protocols.tensors import decode, encode, largest
from petalnode.protocols.training import FORWARD, BatchTerms, MicroBatch
from tests.attacks.forger import ATTACKER, hidden
from tests.signing_server import SigningServer, probed

TOLERANCE = Tolerance(ok_worst=0.02, ok_mean=0.01, faulty_worst=0.04, faulty_mean=0.02)


def with_value(value: float, tokens: int = 3) -> torch.Tensor:
    made = hidden(tokens)
    made[0, -1, ::2] = value
    return made


ATTACKS = [("none", 3.4e38), ("float16", 65504.0)]
"""Infinite in bfloat16; a bfloat16 server's sum, 65536, is infinite in float16."""


@pytest.mark.parametrize(("codec", "value"), ATTACKS)
def test_an_honest_server_is_not_convicted(
    coarse: SigningServer, folder: ModelFolder, codec: str, value: float
) -> None:
    """One that answers, as older versions do: by evidence, and by a validator's judge."""
    log = coarse.session([(0, hidden(3), ()), (3, with_value(value), ())], codec=codec)
    outcome = check_evidence(session_bundle(ATTACKER, log, 1), folder)
    assert outcome.inconclusive and not outcome.proven, outcome
    assert probed(folder, log).verdict == "inconclusive"


def test_an_honest_batch_is_not_convicted(coarse: SigningServer, folder: ModelFolder) -> None:
    outcome = check_evidence(batch_bundle(ATTACKER, coarse.work(with_value(3.4e38), spoil=torch.Tensor.float)), folder)
    assert outcome.inconclusive and not outcome.proven, outcome


def ask(server: SigningServer, codec: str, tensor: torch.Tensor, session: ComputeSession) -> StepOutput | Refusal:
    answers: list[StepOutput | Refusal] = []
    runner = StepRunner(server.blocks)
    described, payload = encode(tensor, codec)
    runner.add(QueuedStep(session, StepInput(session.cache.length, (), described, payload), answers.append))
    while not answers:
        runner.run_turn()
    return answers[0]


@pytest.mark.parametrize(("codec", "value"), ATTACKS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_server_signs_no_answer_that_is_not_finite(
    coarse: SigningServer, codec: str, value: float, tokens: int
) -> None:
    session = ComputeSession(coarse.blocks.make_cache(1, 20), codec)
    assert isinstance(ask(coarse, codec, hidden(4), session), StepOutput)
    refused = ask(coarse, codec, with_value(value, tokens), session)
    # After the blocks have run, the cache holds the step: such a refusal ends the session.
    in_time = session.cache.length == 4
    assert isinstance(refused, Refusal) and (refused.code == wire.ERROR_BAD_REQUEST) == in_time


def test_a_refused_value_leaves_the_cache_alone(coarse: SigningServer) -> None:
    session = ComputeSession(coarse.blocks.make_cache(1, 20), "none")
    assert isinstance(ask(coarse, "none", hidden(4), session), StepOutput)
    assert isinstance(ask(coarse, "none", with_value(3.4e38), session), Refusal)
    assert session.cache.length == 4
    assert isinstance(ask(coarse, "none", hidden(1), session), StepOutput)


@pytest.mark.parametrize(("codec", "value"), ATTACKS)
def test_batchs_infinite_answer_is_refused(coarse: SigningServer, codec: str, value: float) -> None:
    terms = BatchTerms(coarse.version, coarse.span, codec, "float32", bytes(16))
    described, payload = encode(with_value(value), codec)
    request = wire.BatchRequest(sequence=1, tensors=[described])
    unpacked = unpack_request(FORWARD.id, terms, MicroBatch(request, (bytearray(payload),)))
    with pytest.raises(Refusal):
        run_through(run_request(unpacked, SpanPasses(coarse.blocks, 1 << 30)))


# --- the rules


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.3e38])
def test_a_truth_that_is_not_finite_decides_nothing(value: float) -> None:
    truth = hidden(3)
    truth[0, 1, 2] = value
    for claimed in (truth, torch.zeros_like(truth), truth * float("nan")):
        assert judge_distance(distance(claimed, truth), TOLERANCE).result == "inconclusive"
    assert judge_distance(distance(truth * float("nan"), hidden(3)), TOLERANCE).result == "faulty"


def test_infinite_gradients_of_kept_tensors_decide_nothing() -> None:
    right = {"1.q.lora_A": torch.tensor([[float("inf")]])}
    assert not kept_distances({"1.q.lora_A": torch.tensor([[1.0]])}, right)["LoRA's A"].known


@pytest.mark.parametrize("codec", ["none", "float16", "bfloat16", "int8-block64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_called_small_enough_arrives_finite(codec: str, dtype: torch.dtype) -> None:
    tensor = torch.full((1, 1, 64), largest(codec, dtype), dtype=torch.float64).to(dtype)
    limited = torch.where(tensor.double() <= largest(codec, dtype), tensor, tensor * 0.99)
    assert torch.isfinite(decode(*encode(limited, codec))).all()
    tolerance = find_tolerance(Kind("float32", "none", codec=codec))
    assert judge_distance(distance(limited, limited, codec), tolerance).result == "inconclusive"
