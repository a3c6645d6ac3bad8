"""Whether the digests that a server of the exact kind has signed (docs/exact.md) are those of the right answers.

A receipt has the SHA-256 of an answer. Of the exact kind the answer itself is not needed to judge it: it is computed
again, and has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...protocols.inference import sha256
from ...protocols.tensors import encode
from ..models.progress import Progress, no_progress
from .recomputation import Recomputation, SessionAnswer, SessionQuestion


@dataclass(frozen=True)
class SignedAnswers:
    """What one server has signed in a session.

    Attributes:
        digests: for each step of the question, SHA-256 of the answer as it travelled under `codec`; empty where that is
            not known.
    """

    dtype: str
    quantisation: str
    question: SessionQuestion
    codec: str
    digests: tuple[bytes, ...]


def recompute(
    folder: Path, signed: SignedAnswers, progress: Progress = no_progress
) -> tuple[int | None, tuple[torch.Tensor, ...]]:
    """The first step whose digest is wrong, None if all are right; and the right answers, before the codec.

    Raises:
        PetalnodeError: as `Recomputation.answer`.
    """
    (found,) = Recomputation(folder, signed.dtype, signed.quantisation, "cpu", progress).answer([signed.question])
    assert isinstance(found, SessionAnswer)
    digests = zip(signed.digests, found.outputs, strict=True)
    right = (not digest or sha256(encode(output, signed.codec)[1]) == digest for digest, output in digests)
    return next((index for index, is_right in enumerate(right) if not is_right), None), found.outputs
