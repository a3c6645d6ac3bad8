"""A tolerant fingerprint of an answer, for when the answer itself is not kept: a few projections of each token.

Random projections keep distances (Johnson and Lindenstrauss 1984): with P of `PROJECTIONS` rows of random signs, the
expected squared norm of P d is `PROJECTIONS` times that of d. So the fingerprint of a claim and the truth itself give
an estimate of how far apart they are, with a deviation of about sqrt(1 / (2 PROJECTIONS)), an eighth, for one token and
less for many. TOPLOC (Ong et al. 2025) keeps the largest values for the same end.

The signs follow from the hashes of request *and* reply: whoever makes a wrong answer cannot know beforehand on which
directions it will be looked at. A fingerprint is what its maker says of bytes that the server has signed; it is no
proof to a third party, who has to see the bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Final

import torch

from ...crypto.canonical import digest
from ..verification.judging import Distance, relative_distance

DOMAIN: Final = "petalnode/fingerprint/1"
PROJECTIONS: Final = 32
_DOUBT: Final = 1.5
"""By so much the estimate of a single token may be too high (four deviations): the worst of many is taken as less."""


def fingerprint(answer: torch.Tensor, request_hash: bytes, reply_hash: bytes) -> torch.Tensor:
    """Projections of each token of `answer`, float [rows, tokens, hidden]; float32 [rows, tokens, PROJECTIONS]."""
    signs = _signs(request_hash, reply_hash, answer.shape[-1])
    return (answer.detach().to("cpu", torch.float64) @ signs.T).float()


def estimated_distance(kept: torch.Tensor, truth: torch.Tensor, request_hash: bytes, reply_hash: bytes) -> Distance:
    """About how far the answer that `kept` is the fingerprint of is from `truth` [rows, tokens, hidden].

    Raises:
        ValueError: it is no fingerprint of a tensor of that shape.
    """
    if kept.shape != (*truth.shape[:-1], PROJECTIONS):
        raise ValueError(f"a fingerprint of shape {tuple(kept.shape)} is compared with {tuple(truth.shape)}")
    signs = _signs(request_hash, reply_hash, truth.shape[-1])
    right = truth.detach().to("cpu", torch.float64).reshape(-1, truth.shape[-1])
    wrong = kept.to(torch.float64).reshape(-1, PROJECTIONS) - right @ signs.T
    found = relative_distance(wrong.norm(dim=1) / PROJECTIONS**0.5, right.norm(dim=1))
    return replace(found, worst=found.worst / _DOUBT)


def _signs(request_hash: bytes, reply_hash: bytes, hidden: int) -> torch.Tensor:
    seed = digest(DOMAIN, request_hash, reply_hash)
    data = hashlib.shake_256(seed).digest((PROJECTIONS * hidden + 7) // 8)
    bits = torch.frombuffer(bytearray(data), dtype=torch.uint8).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
    return (2.0 * bits.reshape(-1)[: PROJECTIONS * hidden].double() - 1.0).reshape(PROJECTIONS, hidden)
