"""Answers with drafts are those without, whatever happens to the chain on the way."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from petalnode.crypto.identity import Identity, peer_id_from_bytes
from petalnode.crypto.receipts import Receipt
from petalnode.node.blocks.client_part import load_client
from petalnode.node.blocks.outer_layers import OuterLayers
from petalnode.node.blocks.span import load_span
from petalnode.node.client.core import ClientOptions, open_client
from petalnode.node.client.generation.conversation import Conversation
from petalnode.node.client.generation.draft_model import DraftModel
from petalnode.node.client.generation.drafting import DraftCounts, LookupDrafter
from petalnode.node.client.generation.sampling import Constraint, Sampler, Sampling
from petalnode.node.client.swarm_model import identify_model
from petalnode.node.models.sources.resolve import resolve
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.trusted_servers import TrustedServers
from petalnode.node.testing.memory_servers import MemoryServer, MemorySwarm
from petalnode.node.trust.bundle import session_bundle
from petalnode.node.trust.receipt_log import KEPT_RECEIPTS, ReceiptArchive, SessionLog
from petalnode.node.verification.evidence_check import check_evidence
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from tests.swarm.deep_drafts import DEEP, GUESSED
from tests.swarm.fleet import Tap
from tests.swarm.memory_pool import started
from tests.tiny_models import VOCABULARY, save_tiny

pytestmark = pytest.mark.usefixtures("blocks_as_served")
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]
LENGTH = 40


class Chain:
    """Servers of a tiny model, and a client of them with these options. `tap`: what it sends for its last answer."""

    def __init__(self, swarm: MemorySwarm, folder: Path, shared_bytes: int = 0, **options: Any) -> None:
        self._swarm, self._folder, self._options = swarm, folder, ClientOptions(**options)
        self._shared_bytes = shared_bytes
        self.on_step: Callable[[str, wire.Step], object] | None = None

    @asynccontextmanager
    async def _conversation(
        self, drafts: bool, stops: tuple[int, ...], draft_model: DraftModel | None
    ) -> AsyncIterator[Conversation]:
        config = SwarmConfig(identity=Identity.generate(), listen=(), peers=(), serve_dht=False)
        async with self._swarm.network.open_swarm(config) as node:
            self.tap = Tap(node)
            self.tap.on_step = self.on_step
            given = resolve(str(self._folder), need="client", offline=True)
            identified = await identify_model(node, given)
            async with open_client(node, identified, self._options) as client:
                client.state.receipts = ReceiptArchive(self._shared_bytes)
                guess, local = draft_model or drafts, load_client(self._folder)
                conversation = Conversation(client, local, max_length=512, stop_tokens=stops, drafts=guess)
                async with aclosing(conversation):
                    yield conversation

    def answer(
        self,
        sampling: Sampling,
        *,
        drafts: bool,
        on_token: Callable[[int], object] = lambda token: None,
        stops: tuple[int, ...] = (),
        stop_after: int = LENGTH,
        prompts: int = 1,
        constraint: Constraint | None = None,
        draft_model: DraftModel | None = None,
        sampler_type: type[Sampler] = Sampler,
        at_begin: Callable[[Conversation], object] = lambda conversation: None,
        at_end: Callable[[Conversation], object] = lambda conversation: None,
    ) -> tuple[list[int], DraftCounts]:
        """All tokens in the end, and what was drafted; each next prompt is all that was said so far and 5, 6."""

        async def run() -> tuple[list[int], DraftCounts]:
            tokens = list(PROMPT)
            async with self._conversation(drafts, stops, draft_model) as conversation:
                conversation.drafting.fixed = DEEP if draft_model is None else GUESSED
                at_begin(conversation)
                for number in range(prompts):
                    stop = trio.Event()
                    made: list[int] = []

                    def take(token: int, made: list[int] = made, stop: trio.Event = stop) -> None:
                        made.append(token)
                        on_token(len(made))
                        if len(made) == stop_after:
                            stop.set()

                    given = [*tokens, 5, 6] if number else tokens
                    sampler = sampler_type(sampling, constraint)
                    tokens = [*given, *await conversation.answer(given, sampling, take, stop, sampler)]
                    assert tokens[len(given) :] == made
                at_end(conversation)
                return tokens, conversation.drafting.counts

        return self._swarm.call(run)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("drafted"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def servers(swarm: MemorySwarm, folder: Path) -> list[MemoryServer]:
    started = [swarm.start(folder, blocks) for blocks in ("0:3", "3:6", "0:3", "3:6")]
    for server in started:
        assert server.ready
    return started


FEW = dict.fromkeys((5, 6, 7, 8), 20.0)
"""So that a random model repeats itself."""
GREEDY = Sampling(LENGTH, logit_bias=FEW)


@pytest.fixture(scope="module")
def plain(swarm: MemorySwarm, folder: Path, servers: list[MemoryServer]) -> list[int]:
    """The greedy answer without drafts."""
    return Chain(swarm, folder).answer(GREEDY, drafts=False)[0]


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, Sampling(LENGTH, 0.7, 0.9, seed=7, repetition_penalty=1.1, logit_bias=FEW)],
    ids=["greedy", "sampled"],
)
def test_an_answer_is_the_same_with_drafts(
    swarm: MemorySwarm, folder: Path, servers: list[MemoryServer], sampling: Sampling
) -> None:
    chain = Chain(swarm, folder)
    plain, none = chain.answer(sampling, drafts=False, prompts=2)
    drafted, counts = chain.answer(sampling, drafts=True, prompts=2)
    assert drafted == plain and none == DraftCounts() and counts.drafted
    if sampling is GREEDY:
        assert counts.accepted > LENGTH // 4


class Noting:
    """A constraint that forbids nothing, and notes the threads in which it is asked."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def apply(self, scores: torch.Tensor) -> None:
        self.threads.append(threading.get_ident())

    def accept(self, token: int) -> None:
        pass


@pytest.mark.parametrize("killed", [False, True], ids=["all live", "one is killed"])
def test_an_answer_is_the_same_on_one_thread(
    swarm: MemorySwarm, folder: Path, servers: list[MemoryServer], monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Whether the next token is chosen early, on the trio thread, or by another thread after all checks."""

    def kill_one(made: int) -> None:
        if made == LENGTH // 2 and killed and len(elsewhere) == 1:
            whole[0].kill()

    async def own_thread() -> int:
        return threading.get_ident()

    whole = [swarm.start(folder, "0:6") for _ in range(2 if killed else 0)]
    for server in whole:
        assert server.ready
    answers, elsewhere = [], []
    for seconds in (1.0, 0.0):
        monkeypatch.setattr(OuterLayers, "_seconds", lambda layers, hidden, seconds=seconds: seconds)
        noting = Noting()
        chain = Chain(swarm, folder)
        answers.append(chain.answer(Sampling(LENGTH), drafts=False, on_token=kill_one, constraint=noting)[0])
        elsewhere.append(sum(thread != swarm.call(own_thread) for thread in noting.threads))
    assert answers[0] == answers[1] and elsewhere == [LENGTH, 1]
    for server in whole:
        server.kill()


def test_drafts_leave_the_trio_thread_to_messages(
    swarm: MemorySwarm, folder: Path, servers: list[MemoryServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As prompts and rows do, where single steps are computed on it."""

    async def own_thread() -> int:
        return threading.get_ident()

    monkeypatch.setattr(OuterLayers, "_seconds", lambda layers, hidden: 0.0)
    noting, chain = Noting(), Chain(swarm, folder)
    _, counts = chain.answer(GREEDY, drafts=True, constraint=noting)
    elsewhere = sum(thread != swarm.call(own_thread) for thread in noting.threads)
    assert counts.accepted and counts.accepted <= elsewhere


class NeverLess:
    """A constraint that is computed ahead: a token is at least the one before, and 6 follows 5."""

    is_quick = True

    def __init__(self) -> None:
        self._last = 0
        self.is_ready = False

    @property
    def only(self) -> int | None:
        return 6 if self.is_ready and self._last == 5 else None

    def prepare(self) -> None:
        self.is_ready = True

    def apply(self, scores: torch.Tensor) -> None:
        scores[: self._last] = float("-inf")
        if self._last == 5:
            scores[:6] = scores[7:] = float("-inf")

    def accept(self, token: int) -> None:
        assert token == 6 if self._last == 5 else token >= self._last
        self._last, self.is_ready = token, False


class ChoosesTwice(Sampler):
    """As where the answer that a token was chosen from turns out not to be the one that counts."""

    def choose(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        if len(tokens) % 3 == 0:
            super().choose(tokens, torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(len(tokens))))
        return super().choose(tokens, logits)


@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(LENGTH, 0.9, 0.95, seed=5, logit_bias=FEW)], ids=["greedy", "sampled"]
)
def test_answer_is_the_same_with_early_tokens(
    swarm: MemorySwarm,
    folder: Path,
    servers: list[MemoryServer],
    monkeypatch: pytest.MonkeyPatch,
    sampling: Sampling,
    constrained: bool,
) -> None:
    """Also where one was chosen from an answer that is not the one that counts in the end."""
    answers = []
    for seconds in (1.0, 0.0):
        monkeypatch.setattr(OuterLayers, "_seconds", lambda layers, hidden, seconds=seconds: seconds)
        constraint = NeverLess() if constrained else None
        kind = ChoosesTwice if seconds == 0.0 else Sampler
        chosen = Chain(swarm, folder).answer(sampling, drafts=False, constraint=constraint, sampler_type=kind)
        answers.append(chosen[0])
    assert answers[0] == answers[1]


def test_stop_ends_answer_in_middle_of_draft(
    swarm: MemorySwarm, folder: Path, servers: list[MemoryServer], plain: list[int]
) -> None:
    chain = Chain(swarm, folder)
    for stop_after in (1, 30, 31):
        stopped, _ = chain.answer(GREEDY, drafts=True, stop_after=stop_after)
        assert stopped == plain[: len(PROMPT) + stop_after]
    last = plain[-1]
    ended, _ = chain.answer(GREEDY, drafts=True, stops=(last,))
    assert ended == plain[: plain.index(last, len(PROMPT))]


def test_compared_chains_take_drafts(
    swarm: MemorySwarm, folder: Path, servers: list[MemoryServer], plain: list[int]
) -> None:
    drafted, counts = Chain(swarm, folder, compare_chains=2).answer(GREEDY, drafts=True)
    assert drafted == plain and counts.accepted


def test_server_that_dies_checking_drafts_is_replaced(
    swarm: MemorySwarm, folder: Path, servers: list[MemoryServer], plain: list[int]
) -> None:
    servers += [swarm.start(folder, blocks) for blocks in ("0:3", "3:6")]  # so that other tests have two chains
    assert all(server.ready for server in servers[-2:])

    def kill_one(made: int) -> None:
        if made == LENGTH // 2:
            servers[0].kill()
            servers[1].kill()

    drafted, counts = Chain(swarm, folder).answer(GREEDY, drafts=True, on_token=kill_one)
    assert drafted == plain and counts.accepted


def test_session_with_wrong_drafts_is_audited_whole(
    swarm: MemorySwarm, folder: Path, servers: list[MemoryServer]
) -> None:
    """What entered for the steps that were rolled back is known at the servers behind the first one, too."""
    logs: list[SessionLog] = []
    chain = Chain(swarm, folder, shared_bytes=KEPT_RECEIPTS.shared_bytes)
    _, counts = chain.answer(GREEDY, drafts=True, at_end=lambda conversation: logs.extend(conversation.logs))
    assert counts.drafted > counts.accepted and len(logs) == 2
    for log in logs:
        assert log.complete
        answered = [index for index, entry in enumerate(log.entries) if entry.output is not None]
        undone = [entry for entry in log.entries if entry.output is None]
        assert undone and all(entry.input is not None and entry.asked is not None for entry in undone)
        bundle = session_bundle(Identity.generate(), log, answered[-1])
        outcome = check_evidence(bundle, resolve(str(folder), offline=True))
        assert not outcome.proven and not outcome.inconclusive and 0 <= outcome.error <= outcome.tolerance, outcome


class NeverTwice:
    """A constraint: no token follows itself."""

    def __init__(self) -> None:
        self._last: int | None = None

    def apply(self, scores: torch.Tensor) -> None:
        if self._last is not None:
            scores[self._last] = float("-inf")

    def accept(self, token: int) -> None:
        self._last = token


@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
def test_steps_are_under_way_side_by_side(
    swarm: MemorySwarm, folder: Path, servers: list[MemoryServer], constrained: bool
) -> None:
    def constraint() -> Constraint | None:
        return NeverTwice() if constrained else None

    chain = Chain(swarm, folder)
    plain, _ = chain.answer(GREEDY, drafts=False, constraint=constraint())
    assert chain.tap.most == 1
    drafted, counts = chain.answer(GREEDY, drafts=True, constraint=constraint())
    assert drafted == plain and counts.accepted
    assert chain.tap.most >= 4


def test_server_that_dies_with_several_steps_is_replaced(
    swarm: MemorySwarm, folder: Path, servers: list[MemoryServer], plain: list[int]
) -> None:
    servers.append(swarm.start(folder, "3:6"))
    known = {server.ready["peer_id"]: server for server in servers}
    lost: list[str] = []

    def kill_last(peer_id: str, step: wire.Step) -> None:
        if chain.tap.under_way and len(chain.tap.under_way[-1]) == 3 and step.targets and not lost:
            lost.append(peer_id_from_bytes(step.targets[-1].peer_id))
            known[lost[0]].kill()

    chain = Chain(swarm, folder)
    chain.on_step = kill_last
    drafted, counts = chain.answer(GREEDY, drafts=True)
    assert lost and drafted == plain and counts.accepted


def test_servers_that_cannot_push_check_single_drafts(
    swarm: MemorySwarm, folder: Path, servers: list[MemoryServer], plain: list[int]
) -> None:
    """A trusted one tells the next one nothing that has to do with the prompt."""
    ends = started(swarm, folder, "0:2", "4:6")
    chain = Chain(swarm, folder, trusted=TrustedServers(frozenset(server.peer_id for server in ends)))
    drafted, counts = chain.answer(GREEDY, drafts=True)
    assert drafted == plain and counts.accepted and chain.tap.most == 1
    for server in ends:
        server.kill()


def whole_model(folder: Path) -> DraftModel:
    part = load_client(folder)
    return DraftModel(part, load_span(folder, Span(0, part.num_blocks), kernels="auto"))


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(LENGTH, 0.9, 0.95, seed=5, logit_bias=FEW)], ids=["greedy", "sampled"]
)
def test_answer_is_same_with_draft_model(
    swarm: MemorySwarm,
    folder: Path,
    servers: list[MemoryServer],
    tmp_path: Path,
    sampling: Sampling,
) -> None:
    chain = Chain(swarm, folder)
    plain, _ = chain.answer(sampling, drafts=False, prompts=2)
    drafted, counts = chain.answer(sampling, drafts=True, prompts=2, draft_model=whole_model(folder))
    assert drafted == plain
    # The same model with the same random numbers: only what is under way at the end of an answer is in vain.
    assert counts.drafted - counts.accepted <= 2 * 6
    other = whole_model(save_tiny("llama", tmp_path, seed=1, max_position_embeddings=512))
    drafted, counts = chain.answer(sampling, drafts=True, draft_model=other)
    assert drafted == plain[: len(drafted)] and len(drafted) == len(PROMPT) + LENGTH


def test_drafter_of_conversation_knows_what_was_said_before() -> None:
    drafter = LookupDrafter()
    assert not list(drafter.matches([1, 2, 3, 4]))
    (found,) = drafter.matches([1, 2, 3, 4, 9, 2, 3])
    assert found.tokens[:2] == (4, 9)


def test_server_lost_while_a_constrained_model_drafts(
    swarm: MemorySwarm, folder: Path, servers: list[MemoryServer]
) -> None:
    plain, _ = Chain(swarm, folder).answer(GREEDY, drafts=False, constraint=NeverTwice())
    servers.append(swarm.start(folder, "0:3"))
    known = {server.ready["peer_id"]: server for server in servers}
    lost: list[str] = []
    conversations: list[Conversation] = []

    def kill_one(made: int) -> None:
        if made == LENGTH // 2:
            (conversation,) = conversations
            lost.append(conversation.route[0].peer_id)
            known[lost[0]].kill()

    chain = Chain(swarm, folder)
    drafted, _ = chain.answer(
        GREEDY,
        drafts=True,
        draft_model=whole_model(folder),
        constraint=NeverTwice(),
        on_token=kill_one,
        at_begin=conversations.append,
    )
    assert lost and drafted == plain


def test_receipts_follow_each_other_over_drafts_in_vain(
    swarm: MemorySwarm, folder: Path, servers: list[MemoryServer]
) -> None:
    """A server signs each step that it computed, whether it was wanted in the end or not."""
    seen: list[tuple[str, list[Receipt]]] = []

    def look(conversation: Conversation) -> None:
        seen.extend((log.peer_id, [entry.receipt for entry in log.entries]) for log in conversation.logs)

    _, counts = Chain(swarm, folder).answer(GREEDY, drafts=True, at_end=look)
    assert counts.drafted - counts.accepted > 3 and len(seen) == 2
    for peer_id, receipts in seen:
        assert len(receipts) > 3 and all(receipt.is_signed_by(peer_id) for receipt in receipts)
        for before, receipt in pairwise(receipts):
            assert receipt.previous_receipt == before.hash() and receipt.sequence > before.sequence
