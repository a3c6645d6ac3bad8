"""A real server whose blocks compute something else than it says, in a process of the tests; its receipts are in order.

`install(control)` changes this process only; of servers in memory, `follow(control)` makes those false that are started
after it in its context. Sessions and passes that begin from then on follow `control`, a JSON file that
`faulty_server.order` writes, such as {"blocks": "noise", "amount": 0.02}. No such file or an empty name: honest.
What each name does is said beside it in `FALSE`. `amount` is the relative size of noise and the share of requests
(`sometimes`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest.mock import patch
from weakref import WeakSet

import torch

from petalnode.node.blocks import span as span_module
from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.passes import Gradients, SpanPasses
from petalnode.node.blocks.span import BlockSpan, Loading
from petalnode.node.blocks.span import load as load_true
from petalnode.node.server.requests import session as session_module
from petalnode.protocols.ids import Span

FALSE: Final = {
    "noise": "noise of `amount` times each token's size on every output",
    "bit": "the last bit of one value of every output is another",
    "sometimes": "noise of half of each token's size on a share `amount` of the outputs",
    "skipped": "the middle block of its span is left out",
    "wrong": "the middle block of its span has the weights of its neighbour in the model",
    "int8": "int8 weights, whatever was announced",
    "nf4": "nf4 weights, whatever was announced",
    "none/activations=int8": "activations rounded to eight bits, whatever was announced",
    "none/cache=int8": "keys and values in eight bits, whatever was announced",
    "stale": "attention forgets what was decoded: only the prompt and the last token are in the cache",
    "replayed": "every decode step answers what the one before it answered",
    "another": "outputs of another prompt",
    "known": "skips a block in sessions of clients that it has met before; honest to all others, and in passes",
    "gradients": "forward passes are right; gradients come back as they went in",
    "prompts": "all is right except the gradients of deep prompts, which are those of the block before",
    "lora": "all is right except the gradients of LoRA, which are off by a tenth",
}

OTHER_NUMERICS: Final = ("int8", "nf4", "none/activations=int8", "none/cache=int8")
_random = torch.Generator().manual_seed(0)


_followed: ContextVar[Path | None] = ContextVar("followed", default=None)
_for_good = ExitStack()


def follow(control: Path) -> None:
    """Makes every server that is started in this context a false one; `installed` has to hold."""
    _followed.set(control)


def install(control: Path) -> None:
    """Makes every server that this process starts from now on one whose blocks follow `control`."""
    _for_good.enter_context(installed())
    follow(control)


def load_now(control: Path, name: str) -> None:
    """Has the servers in memory that follow `control` load what the fault `name` computes with.

    Loading changes the default dtype of torch for a moment, in all threads: nothing else may compute then.
    """
    for blocks in _FalseBlocks.all:
        if blocks.control == control:
            blocks.instead(name)


@contextmanager
def installed() -> Iterator[None]:
    """For the length of the block, there can be servers with false blocks in this process."""

    def load_false(folder: Path, span: Span, how: Loading) -> BlockSpan:
        blocks, control = load_true(folder, span, how), _followed.get()
        return blocks if control is None else _FalseBlocks.of(blocks, folder, control)

    opening = session_module.ServerSession.__init__

    def opened(self: Any, context: Any, client: str, terms: Any, compute: Any, *rest: Any) -> None:
        if isinstance(compute.cache, _FalseCache):
            compute.cache.meets(client)
        opening(self, context, client, terms, compute, *rest)

    forward, backward = SpanPasses.forward, SpanPasses.backward

    def passing_forward(self: SpanPasses, batch: Any) -> Any:
        blocks = self._span
        name, amount = blocks.ordered() if isinstance(blocks, _FalseBlocks) else ("", 0.0)
        other = blocks.instead(name) if isinstance(blocks, _FalseBlocks) else None
        output = yield from forward(self if other is None else SpanPasses(other, self._activation_bytes), batch)
        return _noisy(output, name, amount)

    def passing_backward(self: SpanPasses, batch: Any, gradient: torch.Tensor) -> Any:
        blocks = self._span
        name, amount = blocks.ordered() if isinstance(blocks, _FalseBlocks) else ("", 0.0)
        other = blocks.instead(name) if isinstance(blocks, _FalseBlocks) else None
        found = yield from backward(
            self if other is None else SpanPasses(other, self._activation_bytes), batch, gradient
        )
        if name == "gradients":
            return Gradients(gradient.to(found.hidden.dtype), found.prompts, found.lora)
        prompts, lora = found.prompts, found.lora
        if name == "prompts" and prompts is not None:
            prompts = prompts.roll(1, dims=0)
        if name == "lora":
            lora = {which: 1.1 * correct for which, correct in lora.items()}
        return Gradients(_noisy(found.hidden, name, amount), prompts, lora)

    def passing_resume(self: SpanPasses, parked: Any, gradient: torch.Tensor) -> Any:
        return (yield from passing_backward(self, parked.batch, gradient))

    passes = {"forward": passing_forward, "backward": passing_backward, "resume": passing_resume}
    with (
        patch.object(span_module, "load", load_false),  # the server imports it when it loads
        patch.object(session_module.ServerSession, "__init__", opened),
        patch.multiple(SpanPasses, **passes),
    ):
        yield


class _FalseCache(SpanCache):
    """The honest cache of a session, and beside it what the false answers need."""

    fault = ""
    amount = 0.0
    twin: SpanCache | None = None
    before: torch.Tensor | None = None
    prompt = 0
    known: set[str]

    def meets(self, client: str) -> None:
        """The session is this client's."""
        if self.fault == "known":
            if client not in self.known:
                self.fault = ""
            self.known.add(client)

    def rollback(self, length: int) -> None:
        super().rollback(length)
        if self.twin is not None:
            self.twin.rollback(min(length, self.twin.length))

    def reorder(self, rows: Sequence[int]) -> None:
        super().reorder(rows)
        if self.twin is not None:
            self.twin.reorder(rows)

    def free(self) -> None:
        super().free()
        if self.twin is not None:
            self.twin.free()


class _FalseBlocks(BlockSpan):
    """Computes what is right, to keep the cache as it must be, and answers what is ordered."""

    all: ClassVar[WeakSet[_FalseBlocks]] = WeakSet()

    @classmethod
    def of(cls, blocks: BlockSpan, folder: Path, control: Path) -> _FalseBlocks:
        blocks.__class__ = cls
        assert isinstance(blocks, _FalseBlocks)
        blocks.begin(folder, control)
        return blocks

    def begin(self, folder: Path, control: Path) -> None:
        self._folder = folder
        self.control = control
        self.all.add(self)
        self._others: dict[str, BlockSpan] = {}
        self._known: set[str] = set()
        self._heard: list[torch.Tensor] = []
        self._decoding = False

    def ordered(self) -> tuple[str, float]:
        wanted = json.loads(self.control.read_text()) if self.control.exists() else {}
        return wanted.get("blocks", ""), wanted.get("amount", 0.0)

    def instead(self, name: str) -> BlockSpan | None:
        """The blocks that the fault `name` computes with; None: the right ones."""
        if name not in ("skipped", "wrong", *OTHER_NUMERICS):
            return None
        if name not in self._others:
            self._others[name] = self._load(name)
        return self._others[name]

    def _load(self, name: str) -> BlockSpan:
        dtype = str(self.dtype).removeprefix("torch.")
        if name in OTHER_NUMERICS:
            computed = "float32" if "/" in name else dtype
            return load_true(self._folder, self.span, Loading(str(self.device), computed, name))
        options: Any = {"device": str(self.device), "dtype": dtype, "quantisation": self.quantisation}
        other = load_true(self._folder, self.span, Loading(**options))
        middle = len(self.span) // 2
        if name == "skipped":
            other.stack.blocks[middle].register_forward_hook(_handed_on, with_kwargs=True, prepend=True)
            return other
        number = self.span.start + middle
        neighbour = number + 1 if number + 1 < self.num_blocks else number - 1
        (wrong,) = load_true(self._folder, Span(neighbour, neighbour + 1), Loading(**options)).stack.blocks
        other.stack.blocks[middle].load_state_dict(wrong.state_dict(), assign=True)
        return other

    def make_cache(self, *args: Any, **options: Any) -> SpanCache:
        cache = super().make_cache(*args, **options)
        cache.__class__ = _FalseCache
        assert isinstance(cache, _FalseCache)
        cache.fault, cache.amount = self.ordered()
        cache.known = self._known
        wanted = "skipped" if cache.fault == "known" else cache.fault
        blocks = self.instead(wanted) or (self if cache.fault in ("stale", "another") else None)
        if blocks is not None:
            cache.twin = BlockSpan.make_cache(blocks, *args, **options)
        return cache

    def forward(self, hidden: torch.Tensor, cache: SpanCache, adapter: Any = None) -> torch.Tensor:
        output = super().forward(hidden, cache, adapter)
        if self._decoding:  # step by step, where the architecture has no other way
            return output
        return self._said(hidden, output, cache, super().forward)

    def decode(
        self, steps: Sequence[tuple[torch.Tensor, SpanCache]], adapters: Sequence[Any] = ()
    ) -> list[torch.Tensor]:
        self._decoding = True
        try:
            outputs = super().decode(steps, adapters)
            one: Callable[..., torch.Tensor] = lambda hidden, cache: BlockSpan.decode(self, [(hidden, cache)])[0]  # noqa: E731
            return [self._said(hidden, out, cache, one) for (hidden, cache), out in zip(steps, outputs, strict=True)]
        finally:
            self._decoding = False

    def _said(
        self, hidden: torch.Tensor, output: torch.Tensor, cache: SpanCache, compute: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        if not isinstance(cache, _FalseCache) or not cache.fault:
            return output
        decodes = hidden.shape[1] == 1
        twin = cache.twin
        match cache.fault:
            case "stale" if twin is not None:
                cache.prompt = cache.prompt if decodes else twin.length + hidden.shape[1]
                twin.rollback(min(twin.length, cache.prompt) if decodes else twin.length)
                return compute(hidden, twin)
            case "another" if twin is not None:
                return compute(self._of_another(hidden), twin)
            case "replayed":
                before, cache.before = cache.before, output
                return before if decodes and before is not None and before.shape == output.shape else output
            case _ if twin is not None:
                other = self.instead("skipped" if cache.fault == "known" else cache.fault)
                assert other is not None
                return other.decode([(hidden, twin)])[0] if decodes else other.forward(hidden, twin)
        return _noisy(output, cache.fault, cache.amount)

    def _of_another(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens that other steps have brought here, as many as in `hidden`."""
        held = torch.cat(self._heard) if self._heard else hidden.flatten(0, 1).flip(0)
        self._heard = [*self._heard[-63:], hidden.flatten(0, 1).clone()]
        count = hidden.shape[0] * hidden.shape[1]
        return held.repeat(count // len(held) + 1, 1)[:count].view_as(hidden)


def _handed_on(block: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """A block that returns what it was given."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])


def _noisy(output: torch.Tensor, name: str, amount: float) -> torch.Tensor:
    share = 1.0
    if name == "bit":
        output = output.clone()
        output.view(torch.int32)[0, 0, 0] ^= 1
    if name == "sometimes":
        share, amount = amount, 0.5
    elif name != "noise":
        return output
    chosen = torch.rand(output.shape[0], 1, 1, generator=_random) < share  # each row is a request of its own
    noise = torch.randn(output.shape, generator=_random) * chosen
    size = output.float().square().mean(-1, keepdim=True).sqrt()
    return (output.float() + amount * size * noise.to(output.device)).to(output.dtype)


def _main() -> None:
    """`python -m tests.swarm.false_blocks CONTROL serve MODEL ...` is `petalnode serve MODEL ...` with such blocks."""
    import sys

    from petalnode.__main__ import main

    install(Path(sys.argv.pop(1)))
    main()


if __name__ == "__main__":
    _main()
