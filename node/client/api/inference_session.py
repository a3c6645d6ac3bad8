"""The synchronous session of the Python API."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ....protocols.framing import TensorError
from ....protocols.ids import LayoutNeeds, Span
from ....protocols.tensors import dtype_name
from ...blocks.images.layout import TEXT, TokenLayout
from ...errors import BadInput, PetalnodeError
from ..chunks import from_chunks, to_chunks
from ..core import SwarmClient
from ..generation.decoding import Decoding, Embedding
from ..generation.drafting import DraftPlan
from ..generation.speculation import Answering, Drafter
from ..session.compared_session import Session
from ..session.session import ClientSession
from ..session.stream import SessionSpec
from ..session_adapter import SessionAdapter
from .runtime import TrioThread


class InferenceSession:
    """Attention caches of one batch of sequences, kept by the servers of a chain.

    The first step opens the session at the servers and sets the batch size. One call at a time. A context manager:
    leaving it closes the session, which frees the caches.

    Attributes:
        max_length: tokens per row at most; servers reserve batch size x max_length.
        tokens: token ids per row, if the session holds what `generate` sent; else None.
        adapter: applies to the blocks in this session instead of the adapter that the model was opened with.
        drafting: what drafts of `generate` have brought so far.
        runtime: the trio thread that its steps run in.
    """

    def __init__(
        self,
        runtime: TrioThread[SwarmClient],
        span: Span,
        max_length: int,
        *,
        wait: bool = False,
        step_timeout: float | None = None,
        adapter: SessionAdapter | None = None,
    ) -> None:
        if max_length < 1:
            raise BadInput(f"max_length is {max_length}: give 1 or more")
        self.max_length = max_length
        self.tokens: list[list[int]] | None = None
        self.drafting = DraftPlan()
        self.runtime = runtime
        self._span = span
        self._wait = wait
        self._step_timeout = step_timeout
        self.adapter = adapter
        self._stack = AsyncExitStack()
        self._session: Session | None = None
        self.is_closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def batch_size(self) -> int | None:
        """The number of rows; None before the first step."""
        return None if self._session is None else self._session.spec.batch

    @property
    def left_padding(self) -> tuple[int, ...] | None:
        """As the first step gave it; empty if no row has any. None before that step."""
        if self._session is None:
            return None
        padding = self._session.spec.left_padding
        return padding if any(padding) else ()

    @property
    def route(self) -> list[tuple[str, tuple[int, int]]]:
        """(peer id, (first block, end)) of every server of the chain; empty before the first step."""
        if self._session is None:
            return []
        return [(hop.peer_id, (hop.span.start, hop.span.end)) for hop in self._session.route]

    @property
    def recoveries(self) -> int:
        """How many failed servers were replaced so far."""
        return 0 if self._session is None else self._session.recoveries

    @property
    def waits(self) -> dict[str, dict[str, Any]]:
        """What the session has waited for so far: for each cause `count`, `total_ms`, `max_ms` and `buckets`, how many
        waits by upper bound in milliseconds. The causes are in docs/recovery.md."""
        return {} if self._session is None else self._session.waits.fields()

    @property
    def drafts(self) -> dict[str, Any]:
        """What drafts of `generate` have brought so far: how many tokens were `drafted` and `accepted`, and in how many
        `steps`. `gained_seconds` is about how many seconds were gained."""
        return self.drafting.counts.fields()

    @property
    def position(self) -> int:
        """Tokens that each row holds. Set it lower to roll back: the next step then replaces the later tokens.

        Raises:
            BadInput: set to more tokens than are held, or below 0.
        """
        return 0 if self._session is None else self._session.position

    @position.setter
    def position(self, position: int) -> None:
        if self._session is not None:
            self._session.position = position
        elif position != 0:
            raise BadInput(f"a session that holds no tokens cannot be set to position {position}")
        if self.tokens is not None:
            self.tokens = [row[:position] for row in self.tokens]

    def fit(self, length: int) -> None:
        """Rolls back to the tokens that a text of `length` tokens of a row can begin with (longrope)."""
        if self._session is not None:
            self._session.fit(length)

    def step(
        self,
        hidden: torch.Tensor,
        *,
        reorder: Sequence[int] = (),
        left_padding: Sequence[int] = (),
        outputs: int | None = None,
        positions: torch.Tensor | None = None,
        layout: TokenLayout = TEXT,
    ) -> torch.Tensor:
        """Runs the next tokens of every row through the blocks and keeps them in the servers' caches.

        Args:
            hidden: float [batch, tokens, hidden]; float32, float16 or bfloat16, any device.
            reorder: per row, the row whose cache it continues (beam search).
            left_padding: per row, how many of its first tokens are padding. First step only.
            outputs: how many of the last tokens of a row the result is needed for. Of a long prompt, that of others
                then need not travel. None: for all.
            positions: int64 [3, batch, tokens] where they have three axes and tokens are not counted, as those of
                pictures (M-RoPE). The first step of a session decides whether any has them.
            layout: in place of positions, all that pictures say of these tokens.

        Returns:
            The same shape, dtype and device; given `outputs`, perhaps of the last tokens only, at least this number.

        Raises:
            BadInput: a shape or dtype that cannot be sent, or more tokens than max_length.
            SwarmError: no chain covers the blocks, or a server failed.
        """
        laid_out = layout if positions is None else TokenLayout(positions)
        with self._lock:
            if self.is_closed:
                raise BadInput("this session is closed; open another with inference_session()")
            if outputs is not None and outputs < 1:
                raise BadInput(f"outputs is {outputs}: give 1 or more, or none for the outputs of all tokens")
            if hidden.requires_grad and torch.is_grad_enabled():
                raise BadInput("an inference session does not carry gradients: call it under torch.no_grad()")
            session = self._session
            if session is None:
                session = self._open(hidden, left_padding, laid_out.needs)
            elif hidden.shape[0] != session.spec.batch:
                raise BadInput(f"this session has {session.spec.batch} rows, not {hidden.shape[0]}")
            elif not session.spec.layout.cover(laid_out.needs):
                raise BadInput("this session began without positions: open another for tokens that have them")
            size = session.chunk_tokens(hidden.shape[1], hidden.shape[2] * (1 + laid_out.blocks))
            chunks = to_chunks(hidden, session.spec.codec, size, laid_out)
            step = session.step
            if isinstance(session, ClientSession):
                step = partial(session.step, outputs=outputs)
            output = from_chunks(self.runtime.call(step, chunks, tuple(reorder)))
            return output.to(hidden.device)

    def call(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Runs `await function(*args)` in the trio thread, which may `decode`. Only after a first step."""
        with self._lock:
            if self.is_closed or self._session is None:
                raise BadInput("this session is closed, or has had no step yet; open another with inference_session()")
            return self.runtime.call(function, *args)

    async def decode(self, answer: Answering, limit: int, embedding: Embedding, drafter: Drafter | None = None) -> None:
        """Extends the answer of all rows up to `limit` tokens, in the trio thread. Only after a first step.

        Raises:
            BadInput: the tokens do not fit into the session.
            SwarmError: no chain covers the blocks, or a server failed.
        """
        session, client = self._session, self.runtime.value
        assert session is not None
        held = answer.tokens[: session.position]
        decoding = Decoding(embedding, session, held, drafter, answering=client.state.answering)
        await decoding.run(answer, len(answer.tokens) - 1, limit)
        session.position = min(session.position, len(answer.tokens) - 1)

    def _open(self, hidden: torch.Tensor, left_padding: Sequence[int], needs: LayoutNeeds) -> Session:
        if hidden.dim() != 3:
            raise BadInput(f"hidden states have shape [batch, tokens, hidden], not {list(hidden.shape)}")
        try:
            dtype = dtype_name(hidden.dtype)
        except TensorError as error:
            raise BadInput(str(error)) from None
        spec = SessionSpec(
            model_version=b"",
            span=self._span,
            batch=hidden.shape[0],
            max_length=self.max_length,
            left_padding=tuple(left_padding),
            dtype=dtype,
            adapter=self.adapter,
            share=True,
            layout=needs,
        )
        if self._step_timeout is not None:
            spec = replace(spec, step_timeout=self._step_timeout)
        return self._enter(spec)

    def _enter(self, spec: SessionSpec, source: ClientSession | None = None) -> Session:
        async def enter() -> Session:
            opened = self.runtime.value.session(spec, wait=self._wait, source=source)
            return await self._stack.enter_async_context(opened)

        self._session = self.runtime.call(enter)
        return self._session

    def fork(self) -> InferenceSession:
        """A session that holds the same tokens and goes on by itself: for several continuations of one text.

        It runs through the same servers where that is possible, and what they have kept is not computed again. They
        keep all but the last 31 tokens, unless another session needs the room or rows have changed places. Each session
        reserves cache of its own and is closed by itself.

        Raises:
            BadInput: this session is closed, or its chains are compared.
            SwarmError: no chain covers the blocks, or a server failed.
        """
        with self._lock:
            if self.is_closed:
                raise BadInput("this session is closed; open another with inference_session()")
            source = self._session
            if source is not None and not isinstance(source, ClientSession):
                raise BadInput("a session whose chains are compared cannot be forked: open another, and send it all")
            forked = InferenceSession(
                self.runtime,
                self._span,
                self.max_length,
                wait=self._wait,
                step_timeout=self._step_timeout,
                adapter=self.adapter,
            )
            if source is not None:
                forked._enter(source.spec, source)
                forked.tokens = None if self.tokens is None else [list(row) for row in self.tokens]
            return forked

    def close(self) -> None:
        """Closes the session and frees the caches at the servers. Safe to call twice."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        if self._session is not None:
            try:
                self.runtime.call(self._stack.aclose)
            except PetalnodeError:
                pass  # a server is gone, or the model is closed: then the servers close the session themselves
