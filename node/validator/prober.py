"""Carries out one probe: a session or a batch as any client has them, of which every answer is kept.

Each probe is a node of its own: a fresh key, a host that joins and leaves, set up like that of `chat`. The client's own
classes do the talking, so a probe is a user in all but its purpose. Only the chain is chosen by the validator.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Final

import torch
import trio

from ...crypto.identity import Identity
from ...protocols.ids import Span
from ...protocols.tensors import decode, dtype_name, encode
from ...protocols.training import BACKWARD, FORWARD, KeptSet
from ..client.api.remote import SpanTensors
from ..client.batch.batch_stream import BatchSpec, micro_batch
from ..client.chunks import to_chunks
from ..client.core import ClientOptions, SwarmClient, open_client
from ..client.deadlines import DEADLINES
from ..client.generation.decoding import Decoding, Embedding
from ..client.generation.sampling import Sampler, Sampling
from ..client.generation.speculation import Answering
from ..client.request import WireTensor
from ..client.server_selection import FixedRoute
from ..client.session.compared_session import Session
from ..client.session.stream import SessionSpec
from ..errors import ServerFailed, SwarmError
from ..swarm.config import SwarmConfig
from ..swarm.routing import Hop
from ..swarm.swarm import open_swarm
from ..trust.receipt_log import KEPT_RECEIPTS, ReceiptArchive
from ..trust.store import TrustStore
from ..verification.observed import Observed, observed_batch, observed_session
from ..verification.recomputation import Recomputation, RecordedStep, SessionAnswer, SessionQuestion
from .probe_inputs import ProbeModel, draw_kept_tensors
from .probe_plan import Probe

PROBE_TIMEOUT: Final = 300.0
"""Of a whole probe, in seconds: what has been seen by then counts."""
_CONTEXT: Final = 4096
_ROOM: Final = (256, 512, 512, 1024)
"""Tokens that users reserve for an answer."""


@dataclass(frozen=True)
class Probed:
    """The result of a probe.

    Attributes:
        archive: receipts of all answers, with the requests.
        devices: by peer id, the kind of device that a server announces.
        failures: by peer id, the error of a server that failed or cheated.
    """

    probe: Probe
    archive: ReceiptArchive
    devices: Mapping[str, str]
    failures: Mapping[str, SwarmError]

    def observed(self) -> list[Observed]:
        """The answers, as tensors to be judged."""
        sessions = (observed_session(log, self.devices.get(log.peer_id, "")) for log in self.archive.sessions)
        batches = (observed_batch(batch, self.devices.get(batch.peer_id, "")) for batch in self.archive.batches)
        return [*(observed for observed in sessions if observed is not None), *batches]


async def run_probe(config: SwarmConfig, model: ProbeModel, probe: Probe) -> Probed:
    """Joins under a new key, carries out `probe`, leaves, and returns the result.

    A server's fault is no error: it is in `failures`.

    Raises:
        SwarmError: no peer answers.
    """
    failures: dict[str, SwarmError] = {}
    archive = ReceiptArchive(shared_bytes=KEPT_RECEIPTS.shared_bytes)
    # With a trust store of its own: servers that this person has banned must be probed all the same.
    host = replace(config, identity=Identity.generate(), trust=TrustStore(), gossip=False)
    async with open_swarm(host) as swarm:
        with suppress(SwarmError):
            await swarm.refresh(model_version=model.swarm_model.version, timeout=DEADLINES.refresh)
        devices = {
            server.peer_id: server.device for server in swarm.view.servers(model.swarm_model.version, now=time.time())
        }
        fixed = FixedRoute(tuple(probe.route))
        async with open_client(swarm, model.swarm_model, ClientOptions(fixed=fixed)) as client:
            client.state.receipts = archive
            with trio.move_on_after(PROBE_TIMEOUT) as scope:
                try:
                    await (_chat if probe.kind == "chat" else _train)(client, model, probe)
                except ServerFailed as error:
                    failures[error.peer_id] = error
                except SwarmError as error:
                    if not fixed.failures and not client.suspected:
                        failures.update({hop.peer_id: error for hop in probe.route})
            suspected = {peer: ServerFailed(f"server {peer} failed", peer) for peer in client.suspected}
            failures = {**suspected, **fixed.failures, **failures}
            if scope.cancelled_caught:
                late = SwarmError(f"the probe was not done after {PROBE_TIMEOUT:.0f} s")
                failures.update({hop.peer_id: late for hop in probe.route if hop.peer_id not in failures})
    return Probed(probe, archive, devices, failures)


# --- a conversation


async def _chat(client: SwarmClient, model: ProbeModel, probe: Probe) -> None:
    random = Random(probe.seed)
    prompt = model.prompt(random)
    limit = min(_session_limit(client, probe), model.local.max_positions or _CONTEXT)
    del prompt[max(1, limit - probe.new_tokens) :]
    spec = SessionSpec(
        model_version=model.swarm_model.version,
        span=probe.span,
        batch=1,
        max_length=min(limit, len(prompt) + max(probe.new_tokens, random.choice(_ROOM))),
        dtype=dtype_name(model.local.dtype),
        share=True,  # as clients have it: a probe looks like any session
    )
    tokens = min(probe.new_tokens, limit - len(prompt))
    async with client.session(spec) as session:
        if probe.span.start == 0 and probe.span.end == model.local.num_blocks:
            await _answer(client, model, probe, session, prompt, len(prompt) + tokens)
        else:
            await _read(
                model, probe, session, await trio.to_thread.run_sync(_text, model, probe, random, prompt), tokens
            )


async def _answer(
    client: SwarmClient, model: ProbeModel, probe: Probe, session: Session, prompt: list[int], limit: int
) -> None:
    """A chain over the whole model answers the prompt, up to `limit` tokens with it."""
    sampler = Sampler(Sampling(probe.new_tokens, probe.temperature, 1.0, probe.seed % 2**31))
    ends = frozenset(() if model.text is None else model.text.stop_tokens)
    answer = Answering(prompt, limit, sampler, lambda token: None, stop_tokens=ends)
    decoding = Decoding(Embedding(model.local), session, [], answering=client.state.answering)
    await decoding.run(answer, len(prompt), limit)


async def _read(model: ProbeModel, probe: Probe, session: Session, hidden: torch.Tensor, steps: int) -> None:
    """A chain over a part of the model reads a text, whose last tokens come one at a time: `hidden` [1, tokens, hidden
    size] is what enters the part."""
    prompt = hidden.shape[1] - probe.new_tokens
    for start, end in pairwise((0, *range(prompt, prompt + steps))):
        part = hidden[:, start:end]
        size = session.chunk_tokens(*part.shape[1:])
        await session.step(await trio.to_thread.run_sync(to_chunks, part, session.spec.codec, size))


def _text(model: ProbeModel, probe: Probe, random: Random, prompt: list[int]) -> torch.Tensor:
    """What enters the part for the prompt and a text behind it. The blocks before the part are computed here."""
    tokens = [*prompt, *model.rows(random, 1, probe.new_tokens)[0].tolist()]
    return _entering(model, probe.span.start, torch.tensor([tokens]))


def _entering(model: ProbeModel, block: int, tokens: torch.Tensor) -> torch.Tensor:
    """The input of `block` for int64 [rows, tokens], computed here: [rows, tokens, hidden size]."""
    hidden = model.local.embed(tokens)
    if not block:
        return hidden
    recomputation = Recomputation(model.swarm_model.folder, dtype_name(model.local.dtype), "none")
    (answer,) = recomputation.answer([SessionQuestion(Span(0, block), (RecordedStep(0, hidden),))])
    assert isinstance(answer, SessionAnswer)
    return answer.outputs[0]


def _session_limit(client: SwarmClient, probe: Probe) -> int:
    """Tokens of a session that all servers of the chain take."""
    route = {hop.peer_id for hop in probe.route}
    servers = [server for server in client.servers() if server.peer_id in route]
    return min(
        (min(server.max_session_length or _CONTEXT, max(server.cache_tokens, 1)) for server in servers), default=1
    )


# --- a batch of a fine-tuning


def _first_gradient(model: ProbeModel, probe: Probe, last: WireTensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of the loss, or where blocks come behind the probe's a random one, for what the `last` server has answered."""
    left = decode(last.tensor, last.payload)
    if probe.span.end == model.local.num_blocks:
        return model.local.loss_gradient(left, tokens)
    generator = torch.Generator().manual_seed(probe.seed % 2**31)
    return 1e-3 * torch.randn(left.shape, generator=generator).to(left.dtype)


async def _train(client: SwarmClient, model: ProbeModel, probe: Probe) -> None:
    random = Random(probe.seed)
    tokens = model.rows(random, probe.rows, min(probe.new_tokens, model.local.max_positions or probe.new_tokens))
    hidden = await trio.to_thread.run_sync(_entering, model, probe.span.start, tokens)
    spec = BatchSpec(model.swarm_model.version, "none", dtype_name(hidden.dtype), model.local.boundaries)
    chunk = WireTensor(*encode(hidden, "none"))
    tensors = draw_kept_tensors(probe.kind, model.local.linears, model.local.hidden_size, random, hidden.shape[1])
    span_tensors = SpanTensors(Span(0, model.local.num_blocks), tensors)
    entered: list[tuple[Hop, WireTensor, KeptSet | None]] = []
    for hop in probe.route:
        kept = await trio.to_thread.run_sync(span_tensors, hop.span, slice(0, 0))
        (output,) = await client.batches.run(FORWARD, hop, spec, micro_batch([chunk], kept), None)
        entered.append((hop, chunk, kept))
        chunk = output
    ahead = {  # as `BatchPass.backward` does
        hop: await client.batches.begin(hop, spec, micro_batch([given, given], kept), None)
        for hop, given, kept in entered[:-1]
    }
    flowing = WireTensor(*encode(await trio.to_thread.run_sync(_first_gradient, model, probe, chunk, tokens), "none"))
    for hop, given, kept in reversed(entered):
        task = micro_batch([given, flowing], kept)
        flowing, *_ = await client.batches.run(BACKWARD, hop, spec, task, None, ahead.get(hop))
