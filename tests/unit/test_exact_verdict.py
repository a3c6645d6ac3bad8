"""Servers of the exact kind are judged by equality: one bit convicts, and an honest one is never called faulty."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from petalnode.node.blocks.kernels import choice
from petalnode.node.blocks.kernels.library import Library
from petalnode.node.verification.judging import judge_bits
from petalnode.node.verification.verdicts import Judge
from tests.exact_sessions import exact_server, served
from tests.tiny_models import HIDDEN, save_tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    return save_tiny("llama", tmp_path / "model")


def test_honest_server_is_right_over_thousands_of_steps(folder: Path, kernels: Library) -> None:
    seen = served(exact_server(folder), kernels, Random(1), rounds=240)
    assert sum(len(one.claimed) for one in seen) > 1500
    assert {verdict.verdict for verdict in Judge(folder).verdicts(seen)} == {"ok"}


@pytest.mark.parametrize("codec", ["none", "bfloat16", "int8-block64"])
def test_one_bit_convicts(folder: Path, kernels: Library, codec: str) -> None:
    random = Random(codec)
    honest = served(exact_server(folder), kernels, random, rounds=6, codec=codec)
    lying = []
    for one in honest:
        claimed = [answer.clone() for answer in one.claimed]
        bits = random.choice(claimed).view(torch.int32).view(-1)
        bits[random.randrange(len(bits))] ^= 1 << random.choice((16, 20, 31) if codec != "none" else (0, 1, 22, 31))
        lying.append(replace(one, claimed=tuple(claimed)))
    judge = Judge(folder)
    if codec == "int8-block64" and HIDDEN % 64:
        assert not any(one.arrives_by_token for one in honest)  # judged by the tolerance
        return
    assert {verdict.verdict for verdict in judge.verdicts(honest)} == {"ok"}
    for verdict in judge.verdicts(lying):
        assert verdict.verdict == "faulty" and verdict.tolerance == 0 and "differs in 1 of" in verdict.reason
        assert verdict.one_bit and "memory" in verdict.reason
    worse = [replace(one, claimed=tuple(-answer for answer in one.claimed)) for one in lying]
    assert not any(verdict.one_bit for verdict in judge.verdicts(worse))


def test_every_bit_of_an_answer_counts(folder: Path, kernels: Library) -> None:
    right = served(exact_server(folder), kernels, Random(3), rounds=1)[0].claimed[0][:, :3]
    assert judge_bits(right.clone(), right).result == "ok"
    for value in range(right.numel()):
        for bit in range(32):
            claimed = right.clone()
            claimed.view(torch.int32).view(-1)[value] ^= 1 << bit if bit < 31 else -(1 << 31)
            judged = judge_bits(claimed, right)
            assert judged.result == "faulty" and judged.one_bit, (value, bit)


def test_nobody_is_called_faulty_where_kernels_are_missing(
    folder: Path, kernels: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = served(exact_server(folder), kernels, Random(2), rounds=3)
    wrong = [replace(one, claimed=tuple(1.01 * answer for answer in one.claimed)) for one in honest]
    monkeypatch.setattr(choice, "library", lambda: None)
    verdicts = Judge(folder).verdicts(honest + wrong)
    assert {verdict.verdict for verdict in verdicts} == {"inconclusive"}
    assert all("exact-1" in verdict.reason for verdict in verdicts)
