"""The Python API: a causal language model whose blocks run in the swarm, used like one of transformers."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from ....protocols.adapter import PROMPTS
from ....protocols.framing import TensorError
from ....protocols.ids import Span
from ....protocols.training import LoraName
from ...blocks.remote import RemoteCache, RemoteCall
from ...errors import BadInput
from ...models import Progress
from ...models.adapters.peft_adapter import Adapter
from ...models.progress import no_progress
from ..session.disjoint import Disagreement
from ..session_adapter import SessionAdapter
from .connected import Opened, open_model
from .inference_session import InferenceSession
from .remote import RemoteSequential, around_here, surroundings

DEFAULT_GENERATED_LENGTH = 20
"""What transformers generates when nobody says how much."""


class AutoDistributedModelForCausalLM:
    """Opens models of a swarm; see `from_pretrained`."""

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        initial_peers: Sequence[str] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        swarm_key: str | os.PathLike[str] | None = None,
        identity: str | os.PathLike[str] | None = None,
        allowed_servers: Collection[str] | None = None,
        blocked_servers: Collection[str] | None = None,
        share_receipts: Sequence[str] = (),
        require_pledge: int | None = None,
        compare_chains: int = 1,
        request_timeout: float | None = None,
        wait: bool = False,
        adapter: str | os.PathLike[str] | None = None,
        progress: Progress = no_progress,
    ) -> DistributedModelForCausalLM:
        """Loads embeddings, final norm and head of `model`, and finds the servers that hold its blocks.

        Args:
            model: a folder in Hugging Face layout, a .gguf file, a hub id or an alias such as "smollm2".
            initial_peers: multiaddrs of nodes to join through; by default PETALNODE_PEERS, comma-separated.
            dtype: of the local part and of what travels; "auto" is the checkpoint's.
            device: of the local part; None is the CPU.
            swarm_key: of a private swarm: its file, or its 64 hexadecimal digits.
            identity: file of this client's key, made if missing; by default a new key each time. For servers that
                serve only clients that they know by their peer id (`petalnode serve --allow-client`).
            allowed_servers, blocked_servers: peer ids to use only, or never.
            share_receipts: auditors, multiaddrs with /p2p, that may look at what servers answered. They can read along.
            require_pledge: use only servers that pledge at least so many points.
            compare_chains: from 2 on, sessions (and `generate`) run through so many chains that share no server, and
                what they answer is compared at every step; see `disagreements`. Calls without a cache are not compared.
            request_timeout: seconds that a server may take for one step.
            wait: while no chain of servers covers the model, wait for one instead of raising.
            adapter: a folder with a LoRA adapter or a prompt (peft's format), which is brought to the servers where
                they do not hold it; or the name of a LoRA adapter that servers hold, and only those are used then.

        Raises:
            ModelError: the model cannot be found or used.
            BadInput: an argument that makes no sense, such as a peer address with a typo.
            SwarmError: no peer answers.
        """
        opened = open_model(
            model,
            initial_peers=initial_peers,
            dtype=dtype,
            device=device,
            revision=revision,
            swarm_key=swarm_key,
            identity=identity,
            allowed_servers=allowed_servers,
            blocked_servers=blocked_servers,
            adapter=adapter,
            share_receipts=share_receipts,
            require_pledge=require_pledge,
            compare_chains=compare_chains,
            progress=progress,
        )
        return DistributedModelForCausalLM(opened, wait=wait, request_timeout=request_timeout)


class DistributedModel:
    """A model of transformers with its blocks in the swarm: what all kinds of them share.

    Calling it, `config`, `parameters` and everything else behave as in transformers: what this class does not define is
    the local transformers model's (`transformers_model`), which holds all but the blocks. Gradients go back through the
    swarm; nothing has them at first, so set `requires_grad_()` on what you train. The servers' blocks never change and
    have no dropout. A context manager; a process that forgets to close it exits cleanly all the same.

    Attributes:
        remote_blocks: all blocks. Another module may be put in their place, which takes and returns hidden states:
            `model.remote_blocks = nn.Sequential(blocks[:10], MyAdapter(), blocks[10:])`. Its parameters are among the
            model's then.
        num_blocks, hidden_size: of the whole model.
        version: the model version, 32 bytes.
        any_token: a token id that is not the padding's.
        linears: per block, (values in, values out) of its linear layers, by their paths in it.
        blocks_path: the name of the list of blocks in the transformers model.
        labels_are_tokens: whether `labels` has an entry for each of `input_ids`.
        soft_prompt: a `PromptTuning` of the adapter that the model was opened with, through which it is called then.
    """

    labels_are_tokens = False

    def __init__(
        self, opened: Opened, transformers_model: Any, *, wait: bool = False, request_timeout: float | None = None
    ) -> None:
        self.transformers_model = transformers_model
        self.path = opened.path
        self.num_blocks = opened.local.num_blocks
        self.hidden_size = opened.local.hidden_size
        self.any_token = opened.local.any_token
        self.linears = opened.local.linears
        self.blocks_path = opened.local.blocks_path
        self._local = opened.local
        self._runtime = opened.runtime
        self.version = opened.runtime.value.model.version
        self._wait = wait
        self._request_timeout = request_timeout
        blocks = Span(0, opened.local.num_blocks)
        self._blocks = RemoteSequential(self._runtime, blocks, wait=wait, step_timeout=request_timeout)
        self._local.layer.inner = self._blocks
        self._local.bind(self._run_blocks)
        self.soft_prompt: Any = None
        if opened.adapter is not None and opened.adapter.soft_prompt is not None:
            from .tuning import PromptTuning

            embeddings = opened.adapter.soft_prompt
            self.soft_prompt = PromptTuning(self, len(embeddings), init=embeddings).requires_grad_(False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "transformers_model" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.transformers_model, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all sessions and leaves the swarm. Safe to call twice."""
        self._runtime.close()

    @property
    def disagreements(self) -> tuple[Disagreement, ...]:
        """Of chains that were compared (`compare_chains`), so far."""
        return tuple(self._runtime.value.disagreements)

    @property
    def remote_blocks(self) -> Any:
        return self._local.layer.inner

    @remote_blocks.setter
    def remote_blocks(self, blocks: nn.Module) -> None:
        self._local.layer.inner = blocks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' forward, without a cache unless `past_key_values` or `use_cache=True` is given.

        Batches may be padded at either side. With `output_hidden_states=True` the blocks run one by one; gradients go
        back from what is between them, too.

        Raises:
            BadInput: hidden states are wanted with a cache, or from other modules than the model's blocks.
        """
        if self.soft_prompt is not None and not self._local.is_prompted:
            return self.soft_prompt(*args, **kwargs)
        if kwargs.get("past_key_values") is None:
            kwargs.setdefault("use_cache", False)
        wanted = kwargs.get("output_hidden_states")
        if self.config.output_hidden_states if wanted is None else wanted:
            return self._forward_with_states(*args, **kwargs | {"output_hidden_states": False})
        return self.transformers_model(*args, **kwargs)

    def _forward_with_states(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None or kwargs["use_cache"]:
            raise BadInput(
                "there are no hidden states between blocks in a session: call the model with use_cache=False"
            )
        if self.remote_blocks is not self._blocks:
            raise BadInput("other modules stand between the blocks: let them keep the hidden states that you want")
        entered: list[torch.Tensor] = []
        with surroundings(replace(around_here(), entered=entered)), self._local.last_hidden_state() as last:
            output = self.transformers_model(*args, **kwargs)
        states = (*entered, *last)
        if isinstance(output, tuple):
            return *output, states
        output.hidden_states = states
        return output

    @contextmanager
    def prompted(
        self, prompts: torch.Tensor, deep: torch.Tensor | None = None, *, starts: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Within it, soft prompts stand in the place of some tokens of every row, in this thread.

        Args:
            prompts: [prefix, embedding size], in place of what the embeddings make of the first `prefix` tokens.
            deep: [blocks, prefix, hidden], added to the first positions of what enters each block.
            starts: [rows], the first token of each row that the prompts stand for; None is the first of all.
        """
        around = replace(around_here(), prompts=None if deep is None else deep.unsqueeze(1))
        with self._local.prompted(prompts, starts), surroundings(around):
            yield

    def changed(self, lora: Mapping[LoraName, torch.Tensor]) -> AbstractContextManager[None]:
        """Within it, these tensors change linear layers of the servers' blocks for calls of this thread."""
        return surroundings(replace(around_here(), lora=lora))

    def _run_blocks(self, hidden: torch.Tensor, call: RemoteCall) -> torch.Tensor:
        """What stands in the local model instead of its blocks."""
        if call.cache is not None:
            return self._run_in_session(hidden, call, call.cache)
        around = replace(around_here(), mask=call.attention_mask, positions=call.position_ids)
        with surroundings(around):
            if around.entered is None:
                output: torch.Tensor = self.remote_blocks(hidden)
                return output
            for block in self._blocks:
                around.entered.append(hidden)
                hidden = block(hidden)
            return hidden

    def _run_in_session(self, hidden: torch.Tensor, call: RemoteCall, cache: RemoteCache) -> torch.Tensor:
        raise BadInput("this model keeps no cache: call it with use_cache=False")


class DistributedModelForCausalLM(DistributedModel):
    """A causal language model with its blocks in the swarm; see `DistributedModel`.

    `generate` and calling it with `labels` behave as in transformers.
    """

    labels_are_tokens = True

    def __init__(self, opened: Opened, *, wait: bool = False, request_timeout: float | None = None) -> None:
        super().__init__(opened, opened.local.model, wait=wait, request_timeout=request_timeout)
        self._active: list[InferenceSession] = []

    def inference_session(self, max_length: int) -> InferenceSession:
        """A session for up to `max_length` tokens a row. Within `with`, `generate` uses it by itself."""
        session = InferenceSession(
            self._runtime,
            self._blocks.span,
            max_length,
            wait=self._wait,
            step_timeout=self._request_timeout,
            on_exit=self._deactivate,
        )
        self._active.append(session)
        return session

    @property
    def active_session(self) -> InferenceSession | None:
        """The innermost open session, which `generate` uses."""
        return self._active[-1] if self._active else None

    def _deactivate(self, session: InferenceSession) -> None:
        if session in self._active:
            self._active.remove(session)

    @torch.no_grad()
    def generate(
        self, inputs: torch.Tensor | None = None, *, session: InferenceSession | None = None, **kwargs: Any
    ) -> Any:
        """transformers' generate: greedy, sampling, beam search, left-padded batches.

        Args:
            inputs: token ids [batch, tokens]; also as `input_ids`.
            session: keeps the caches from call to call; by default the active session, else one for this call.
                Give the whole sequence: what the session holds of it already is not sent again, and what differs
                is rolled back.
        """
        input_ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        if input_ids is None or input_ids.dim() != 2 or not input_ids.numel():
            raise BadInput("generate needs input_ids of shape [batch, tokens], with at least one token")
        if kwargs.get("output_hidden_states"):
            raise BadInput(
                "generate has no hidden states between blocks: call the model with the tokens that it returns"
            )
        if self.soft_prompt is not None and not self._local.is_prompted:
            if session is not None:
                raise BadInput("a session is kept by one call only, because a prompt stands before its tokens")
            return self.soft_prompt.generate(input_ids, **kwargs)
        if kwargs.get("use_cache") is False:
            return self.transformers_model.generate(input_ids, **kwargs)
        if self.remote_blocks is not self._blocks:
            raise BadInput(
                "a session runs through the servers' blocks only, not through the modules that were put between them: "
                "generate with use_cache=False"
            )
        adapter = self._adapter_around()
        # What stands for the first tokens of a row under prompts is not in their ids: no session may go on from it.
        session = session or (None if self._local.is_prompted or adapter else self.active_session)
        if session is None:
            length = self._total_length(input_ids.shape[1], kwargs)
            with InferenceSession(
                self._runtime,
                self._blocks.span,
                length,
                wait=self._wait,
                step_timeout=self._request_timeout,
                adapter=adapter,
            ) as own:
                return self._generate_in(own, input_ids, kwargs)
        return self._generate_in(session, input_ids, kwargs)

    def _adapter_around(self) -> SessionAdapter | None:
        """LoRA weights and deep prompts that calls of this thread shall be changed by, for a session of their own.

        Raises:
            BadInput: they cannot be sent.
        """
        around = around_here()
        tensors = {str(name): each.detach() for name, each in around.lora.items()}
        if around.prompts is not None:
            tensors |= {f"{block}.{PROMPTS}": each[0].detach() for block, each in enumerate(around.prompts)}
        for name, each in tensors.items():
            if not torch.isfinite(each).all():
                raise BadInput(f"the weights {name} hold NaN or infinity")
        try:
            return SessionAdapter.of(Adapter.of("tuned", tensors)) if tensors else None
        except TensorError as error:
            raise BadInput(str(error)) from None

    def _generate_in(self, session: InferenceSession, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        tokens = input_ids.tolist()
        # The last token is always sent: its output is what the next one is chosen from.
        session.position = min(_shared(session.tokens, tokens), input_ids.shape[1] - 1)
        session.tokens = None
        cache = RemoteCache(session)
        cache.advance(session.position)
        result = self.transformers_model.generate(input_ids, past_key_values=cache, use_cache=True, **kwargs)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        beams = kwargs.get("num_beams") or self.transformers_model.generation_config.num_beams or 1
        if beams == 1 and sequences.shape[0] == session.batch_size:
            session.tokens = sequences[:, : session.position].tolist()
        return result

    def _total_length(self, prompt: int, kwargs: dict[str, Any]) -> int:
        config = kwargs.get("generation_config") or self.transformers_model.generation_config
        new = kwargs.get("max_new_tokens") or (
            None if kwargs.get("max_length") else getattr(config, "max_new_tokens", None)
        )
        if new:
            return prompt + int(new)
        total = kwargs.get("max_length") or getattr(config, "max_length", None)
        return max(int(total) if total else prompt + DEFAULT_GENERATED_LENGTH, prompt + 1)

    def _run_in_session(self, hidden: torch.Tensor, call: RemoteCall, cache: RemoteCache) -> torch.Tensor:
        around = around_here()
        padding = call.left_padding or ()
        if padding and max(padding) >= call.position + hidden.shape[1]:
            raise BadInput("a row of the attention mask hides all of its tokens")
        session = cache.session
        if not isinstance(session, InferenceSession):
            raise BadInput("a cache belongs to a session here: use generate(), or inference_session() and its step()")
        if (around.prompts is not None or around.lora) and session.adapter is None:
            raise BadInput(
                "deep prompts and LoRA change a session from its beginning: generate without session=, which makes one"
            )
        if session.position > call.position:
            session.position = call.position
        return session.step(hidden, reorder=cache.take_reorder() or (), left_padding=padding)


def _shared(held: list[list[int]] | None, wanted: list[list[int]]) -> int:
    """How many leading tokens all rows have in common with what is held."""
    if held is None or len(held) != len(wanted):
        return 0
    shared = min(len(held[0]), len(wanted[0]))
    for left, right in zip(held, wanted, strict=True):
        for index in range(shared):
            if left[index] != right[index]:
                shared = index
                break
    return shared
