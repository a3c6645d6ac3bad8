"""Whether servers that take the place of another one of the exact kind (docs/exact.md) compute what it has signed.

They replay its inputs, so they have to end in the digests that stand on its receipts. If they do not, one of them is
wrong, and the receipts do not say which: a server that has answered wrong and is gone must not have those punished that
come after it. Own weights say it, where they are here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from ....protocols.inference import sha256
from ...errors import PetalnodeError, ServerFailed, SwarmError
from ...models import compute_manifest
from ..swarm_model import SwarmModel
from .answers import SessionSpec
from .history import Input, InputHistory, part_of
from .link import ServerLink

if TYPE_CHECKING:
    from ...verification.recomputation import RecordedStep

log = logging.getLogger(__name__)


class ComputesOther(ServerFailed):
    """A server computes other bits than the one whose place it takes has signed. Nobody is blamed by that alone."""


class AnsweredWrong(SwarmError):
    """A server that was in the chain has signed wrong answers: what followed from them is of no use."""


def differs_at(answered: Sequence[Input], replayed: Input) -> int | None:
    """The position of the first step within `replayed` whose signed answer is not what `replayed` has; None: all are,
    as far as they were signed. Hashes it all: not for the trio thread."""
    signed = (step for step in answered if step.answered)
    within = (step for step in signed if replayed.position <= step.position and step.end <= replayed.end)
    for step in within:
        if sha256(part_of(replayed, step.position, step.end).chunk.payload) != step.answered:
            return step.position
    return None


async def check_replay(history: InputHistory, spec: SessionSpec, links: Sequence[ServerLink], replayed: Input) -> None:
    """Holds what has left the last of `links` to what the server of `history` has signed before them.

    Raises:
        ComputesOther: it is something else.
    """
    lost = history.signer
    signers = [link.server.signer for link in links]
    if lost is None or any(
        one is None or (one.dtype, one.quantisation) != (lost.dtype, lost.quantisation) for one in signers
    ):
        return
    if len(links) > 1 and (spec.codec, spec.dtype) != ("none", "float32"):
        return  # rounded between them
    position = await trio.to_thread.run_sync(differs_at, tuple(history.inputs), replayed)
    if position is not None:
        hop = links[-1].server.hop
        what = f"for token {position} it computes something else than {lost.hop.peer_id} has signed"
        raise ComputesOther(f"server {hop.peer_id} (blocks {hop.span}): {what}", hop.peer_id)


def wrong_signers(model: SwarmModel, spec: SessionSpec, histories: Sequence[InputHistory]) -> set[str]:
    """The servers of these histories that have signed other answers than own weights give; none where the weights are
    not here. Takes as long as the recomputation: not for the trio thread."""
    # A client that recomputes nothing starts without torch: 1 s.
    from ...verification.answer_check import SignedAnswers, recompute
    from ...verification.recomputation import SessionQuestion

    wrong = set()
    try:
        if compute_manifest(model.folder).version != model.version:
            return set()
        for history in histories:
            signer, inputs = history.signer, history.inputs
            if signer is None or not inputs:
                continue
            question = SessionQuestion(signer.hop.span, steps_of(inputs), spec.left_padding)
            digests = tuple(step.answered for step in inputs)
            signed = SignedAnswers(signer.dtype, signer.quantisation, question, spec.codec, digests)
            if recompute(model.folder.path, signed)[0] is not None:
                wrong.add(signer.hop.peer_id)
    except (PetalnodeError, ValueError) as error:
        log.info("what servers differ in cannot be computed here: %s", error)
        return set()
    return wrong


def steps_of(inputs: Sequence[Input]) -> tuple[RecordedStep, ...]:
    """The same for a recomputation."""
    from ...verification.recomputation import RecordedStep
    from ..chunks import from_chunks

    return tuple(
        RecordedStep(step.position, from_chunks([step.chunk]), step.reorder, step.long_factors, step.chunk.layout)
        for step in inputs
    )
