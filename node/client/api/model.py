"""A transformers model whose blocks run in the swarm: what all kinds of it share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from ....protocols.ids import Span
from ....protocols.training import LoraName
from ...blocks.client_part import SoftPrompt
from ...blocks.remote_cache import RemoteCache, RemoteCall
from ...errors import BadInput
from ..core import CODEC_OF, exact_for
from ..session.comparing import Disagreement
from .arguments import forward_arguments, take_images
from .opening import OpenedModel
from .remote import RemoteSequential, forward_context, within


class DistributedModel:
    """A transformers model with its blocks in the swarm: what all kinds of it share.

    Attributes that this class does not define (`config`, `parameters`, ...) are those of `transformers_model`, the
    local model, which holds everything but the blocks. Gradients pass through the swarm; no parameter has
    `requires_grad` at first, so set it on what you train. The servers' blocks never change and have no dropout. A
    context manager: leaving it closes the model. A process that does not close it exits cleanly all the same.

    Attributes:
        remote_blocks: all blocks. May be set to another module that takes and returns hidden states [batch, tokens,
            hidden]. An example is `nn.Sequential(blocks[:10], MyAdapter(), blocks[10:])`, whose parameters then belong
            to the model.
        num_blocks, hidden_size: of the whole model.
        version: the model version, 32 bytes.
        any_token: a token id that is not that of padding.
        linears: per block, (input size, output size) of its linear layers, by their paths in the block.
        blocks_path: the name of the list of blocks in the transformers model.
        labels_are_tokens: whether `labels` has the shape of `input_ids`.
        soft_prompt: the `PromptTuning` of the adapter that the model was opened with, or None; calls go through it.
    """

    labels_are_tokens = False

    def __init__(self, opened: OpenedModel, transformers_model: Any) -> None:
        local = opened.local
        self.transformers_model = transformers_model
        self.path = opened.path
        self.num_blocks = local.num_blocks
        self.hidden_size = local.hidden_size
        self.any_token = local.any_token
        self.linears = local.linears
        self.blocks_path = local.blocks_path
        self.soft_prompt: Any = None
        self.version = opened.runtime.value.model.version
        self._local = local
        self._runtime = opened.runtime
        self._blocks = RemoteSequential(
            opened.runtime,
            Span(0, local.num_blocks),
            wait=opened.wait,
            step_timeout=opened.request_timeout,
            codec=CODEC_OF[exact_for(opened.batch_codec, local.boundaries)],
        )
        self._local.layer.inner = self._blocks
        self._local.bind(self._run_blocks)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "transformers_model" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.transformers_model, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all sessions and leaves the swarm. Safe to call twice."""
        self._runtime.close()

    @property
    def disagreements(self) -> tuple[Disagreement, ...]:
        """Differences found so far between chains that were compared (`compare_chains`)."""
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

        Batches may be padded at either side. With `output_hidden_states=True` the blocks run one by one, and gradients
        pass through the hidden states that are returned.

        Raises:
            TypeError: an argument that the model does not have.
            BadInput: one that the servers' blocks would not get, such as `output_attentions`; or `output_hidden_states`
                with a cache, or with other modules in place of the blocks.
            SwarmError: no chain covers the blocks, or several servers failed.
        """
        if images := take_images(kwargs, self._local.encoder):
            ids = kwargs.get("input_ids") if not args else args[0]
            if not isinstance(ids, torch.Tensor):
                raise BadInput("pictures need input_ids, with the tokens that stand for them")
            with self._seeing(ids, kwargs.get("attention_mask"), images):
                return self.forward(*args, **kwargs)
        given = forward_arguments(self.transformers_model.forward, args, kwargs)
        if self.soft_prompt is not None and self._local.prompt is None:
            return self.soft_prompt(*args, **kwargs)
        if given.get("past_key_values") is None and given.get("use_cache") is None:
            given["use_cache"] = False
            if self.config.use_cache and given.get("position_ids") is not None and given.get("attention_mask") is None:
                # transformers would make a cache, and so take each row for one text, wherever its positions begin anew.
                given["attention_mask"] = torch.ones_like(given["position_ids"])
        wanted = given.get("output_hidden_states")
        if self.config.output_hidden_states if wanted is None else wanted:
            return self._forward_with_states(**given | {"output_hidden_states": False})
        return self.transformers_model(**given)

    def _seeing(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, images: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """A context in which these tokens are seen with their pictures, for calls of this thread."""
        if self._local.prompt is not None or self.soft_prompt is not None:
            raise BadInput("pictures cannot be combined with a soft prompt: leave out one of them")
        return self._local.prompted(self._local.encoder.encode(input_ids, mask, images))

    def _forward_with_states(self, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None or kwargs["use_cache"]:
            raise BadInput(
                "a session does not return the hidden states between blocks: call the model with use_cache=False"
            )
        if self.remote_blocks is not self._blocks:
            raise BadInput("remote_blocks was replaced: record the hidden states in your own module")
        entered: list[torch.Tensor] = []
        with within(replace(forward_context(), block_inputs=entered)), self._local.last_hidden_state() as last:
            output = self.transformers_model(**kwargs)
        states = (*entered, *last)
        if isinstance(output, tuple):
            return *output, states
        output.hidden_states = states
        return output

    @contextmanager
    def prompted(
        self, prompts: torch.Tensor, deep: torch.Tensor | None = None, *, starts: torch.Tensor | None = None
    ) -> Iterator[None]:
        """A context in which soft prompts replace embeddings of some tokens of every row, for this thread's calls.

        Args:
            prompts: [prefix, embedding size], in place of the embeddings of the first `prefix` tokens.
            deep: [blocks, prefix, hidden], added to the input of each block at the first `prefix` positions.
            starts: [rows], where the prompts begin in each row; None is at its first token.
        """
        context = replace(forward_context(), prompts=None if deep is None else deep.unsqueeze(1))
        with self._local.prompted(SoftPrompt(prompts, starts)), within(context):
            yield

    def changed(self, lora: Mapping[LoraName, torch.Tensor]) -> AbstractContextManager[None]:
        """A context in which these LoRA weights change layers of the servers' blocks, for calls of this thread."""
        return within(replace(forward_context(), lora=lora))

    def _run_blocks(self, hidden: torch.Tensor, call: RemoteCall) -> torch.Tensor:
        """Called by the local model in place of its blocks: hidden [batch, tokens, hidden] to the same shape."""
        if call.cache is not None:
            return self._run_in_session(hidden, call, call.cache)
        if call.layout.groups is not None or call.layout.features is not None:
            return self._run_once(hidden, call)
        self._check_factors(call.position_ids)
        context = replace(forward_context(), mask=call.attention_mask, positions=call.position_ids)
        with within(context):
            if context.block_inputs is None:
                output: torch.Tensor = self.remote_blocks(hidden)
                return output
            for block in self._blocks:
                context.block_inputs.append(hidden)
                hidden = block(hidden)
            return hidden

    def _run_once(self, hidden: torch.Tensor, call: RemoteCall) -> torch.Tensor:
        """A forward pass with pictures of which only sessions know how they are laid out.

        Raises:
            BadInput: gradients are wanted.
        """
        context = forward_context()
        trained = context.prompts is not None or context.lora or context.block_inputs is not None
        if trained or (hidden.requires_grad and torch.is_grad_enabled()):
            raise BadInput("pictures of this model have no gradients: call it under torch.no_grad(), without adapters")
        with self._blocks.inference_session(hidden.shape[1]) as session, torch.no_grad():
            return session.step(hidden, left_padding=call.left_padding or (), layout=call.layout)

    def _check_factors(self, positions: torch.Tensor | None) -> None:
        """
        Raises:
            BadInput: some rows are long (longrope), by which all would be, and others not. They may travel apart.
        """
        original = self._local.original_length
        if original is None or positions is None or positions.dim() != 2:
            return
        lengths = positions.amax(dim=1) + 1
        if int(lengths.max()) > original >= int(lengths.min()):
            raise BadInput(
                f"some rows are longer than the {original} tokens from which on this model's positions mean something "
                "else, and some are not: call it with the rows one by one"
            )

    def _run_in_session(self, hidden: torch.Tensor, call: RemoteCall, cache: RemoteCache) -> torch.Tensor:
        raise BadInput("this model has no cache: call it with use_cache=False")
