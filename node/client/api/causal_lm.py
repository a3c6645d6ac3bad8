"""A causal language model whose blocks run in the swarm: used like one of transformers."""

from __future__ import annotations

import os
from typing import Any, Unpack

import torch

from ....protocols.framing import TensorError
from ....protocols.training import PROMPTS
from ...blocks.remote_cache import RemoteCache, RemoteCall, positions
from ...errors import BadInput
from ...models.adapter import Adapter
from ..generation.drafting import DraftCounts
from ..generation.mtp_head import mtp_head
from ..session_adapter import SessionAdapter
from .arguments import check_generate, take_images
from .generating import BatchDecoding, GenerateOptions, merged_config, take_draft_options, takes_loop, with_loop
from .inference_session import InferenceSession
from .model import DistributedModel
from .opening import ModelOptions, OpenedModel, open_model, takes_model_options
from .remote import forward_context
from .row_drafts import first_gain
from .tuning import soft_prompt


class AutoDistributedModelForCausalLM:
    """Opens causal language models of a swarm; see `from_pretrained`."""

    @classmethod
    @takes_model_options
    def from_pretrained(
        cls, model: str | os.PathLike[str], **options: Unpack[ModelOptions]
    ) -> DistributedModelForCausalLM:
        """Loads embeddings, final norm and head of `model`, and finds the servers that hold its blocks.

        Args:
            model: a folder in Hugging Face layout, a .gguf file, a hub id or an alias such as "smollm2".

        Raises:
            ModelError: the model cannot be found or used.
            BadInput: an argument that makes no sense, such as a peer address with a typo.
            MachineError: another process uses the identity.
            SwarmError: no peer answers.
        """
        return DistributedModelForCausalLM(open_model(model, options))


class DistributedModelForCausalLM(DistributedModel):
    """A causal language model with its blocks in the swarm; see `DistributedModel`.

    `generate` and calling it with `labels` behave as in transformers.

    Attributes:
        drafts: what drafts brought in the last `generate`, as `InferenceSession.drafts`. `rows` has the same for each
            row of a batch that took drafts. Rows are made at once: the seconds of the batch are the least of theirs.
    """

    labels_are_tokens = True

    def __init__(self, opened: OpenedModel) -> None:
        super().__init__(opened, opened.local.model)
        self.soft_prompt = soft_prompt(self, opened.adapter)
        self._active: list[InferenceSession] = []
        self.drafts: dict[str, Any] = DraftCounts().fields()
        self._draft_gain = first_gain()

    def inference_session(self, max_length: int) -> InferenceSession:
        """A session for up to `max_length` tokens per row, which `generate` uses until the session is closed."""
        session = self._blocks.inference_session(max_length)
        self._active = [*self._open_sessions(), session]
        return session

    @property
    def active_session(self) -> InferenceSession | None:
        """The innermost open session, which `generate` uses."""
        self._active = self._open_sessions()
        return self._active[-1] if self._active else None

    def _open_sessions(self) -> list[InferenceSession]:
        return [session for session in self._active if not session.is_closed]

    @torch.no_grad()
    def generate(
        self, inputs: torch.Tensor | None = None, *, session: InferenceSession | None = None, **kwargs: Any
    ) -> Any:
        """transformers' generate: greedy, sampling, beam search, left-padded batches.

        Args:
            inputs: token ids [batch, tokens]; also as `input_ids`.
            pixel_values, image_grid_thw, ...: what the model's processor makes of pictures, beside `input_ids`. They
                are encoded on this machine, and servers get hidden states only. Not with `session`.
            session: keeps the attention caches from call to call. By default the active session, else a new one for
                this call. Give the whole sequence: tokens that the session already holds are not sent again. Tokens
                that differ are rolled back.
            prompt_lookup_num_tokens, assistant_model, use_mtp: as in transformers, for tokens that are guessed and
                checked several at once. They come from the text, from a smaller model on this machine, or from the
                model's MTP head. The answer is the same, with the same seed too. How many are guessed follows from
                measurements, not from the number given. Rows of a batch take drafts each for itself where that is
                quicker than one batch without.
            num_assistant_tokens, num_assistant_tokens_schedule: with "constant", each draft has this many tokens. Rows
                take drafts each for itself, whether that is quicker or not.

        Returns:
            What transformers returns: token ids [batch x returned sequences, tokens], or its output object.

        Raises:
            BadInput: arguments that cannot be used together, or are of a wrong shape.
            SwarmError: no chain covers the blocks, or several servers failed.
        """
        input_ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        if input_ids is None or input_ids.dim() != 2 or not input_ids.numel():
            raise BadInput("generate needs input_ids of shape [batch, tokens], with at least one token")
        check_generate(kwargs, self.transformers_model.generation_config)
        if images := take_images(kwargs, self._local.encoder):
            if session is not None:
                raise BadInput("session= cannot be combined with pictures, which a session does not know by token ids")
            with self._seeing(input_ids, kwargs.get("attention_mask"), images):
                return self.generate(input_ids, **kwargs)
        if self.soft_prompt is not None and self._local.prompt is None:
            if session is not None:
                raise BadInput("session= cannot be combined with a soft prompt, whose tokens a session does not know")
            return self.soft_prompt.generate(input_ids, **kwargs)
        options = take_draft_options(kwargs, self.transformers_model)
        if options.mtp_head and mtp_head(self._local) is None:
            raise BadInput("use_mtp: this model has no MTP head that can be used here; leave it out")
        if kwargs.get("use_cache") is False:
            return self.transformers_model.generate(input_ids, **kwargs)
        if self.remote_blocks is not self._blocks:
            raise BadInput(
                "a session runs through the servers' blocks only, and remote_blocks was replaced: "
                "generate with use_cache=False"
            )
        adapter = self._context_adapter()
        # Under prompts the first token ids of a row are placeholders, so no session may be continued by comparing ids.
        session = session or (None if self._local.prompt is not None or adapter else self.active_session)
        length = self._total_length(input_ids.shape[1], kwargs)
        if session is not None:
            return self._generate_in(session, input_ids, kwargs, options, length)
        with self._blocks.inference_session(length, adapter=adapter) as own:
            return self._generate_in(own, input_ids, kwargs, options, length, is_new=True)

    def _context_adapter(self) -> SessionAdapter | None:
        """The LoRA weights and deep prompts of the forward context, for a session of their own; None if there are none.

        Raises:
            BadInput: they cannot be sent.
        """
        context = forward_context()
        tensors = {str(name): weight.detach() for name, weight in context.lora.items()}
        if context.prompts is not None:
            tensors |= {f"{block}.{PROMPTS}": rows[0].detach() for block, rows in enumerate(context.prompts)}
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise BadInput(f"the weights {name} hold NaN or infinity")
        try:
            return SessionAdapter.of(Adapter.of("tuned", tensors)) if tensors else None
        except TensorError as error:
            raise BadInput(str(error)) from None

    def _generate_in(
        self,
        session: InferenceSession,
        input_ids: torch.Tensor,
        kwargs: dict[str, Any],
        options: GenerateOptions,
        length: int,
        is_new: bool = False,
    ) -> Any:
        """`is_new`: of a session that nobody else uses; its rows may go on in others beside it."""
        # The longest row of a batch decides about the factors of all: they stay together.
        may_become_long = self._local.original_length is not None and length > self._local.original_length
        is_free = is_new and session.adapter is None and self._local.prompt is None and not may_become_long
        decoding = BatchDecoding(self._local, self._blocks, session, options, self._draft_gain, is_free)
        config, arguments = merged_config(kwargs, self.transformers_model)
        # Where a long text begins, all of it is embedded anew, in a thread that has no prompts.
        if not (self._local.prompt is not None and may_become_long) and takes_loop(kwargs, config, arguments):
            kwargs = with_loop(kwargs, self.transformers_model, decoding)
        tokens = input_ids.tolist()
        # The last token is always sent: its output is what the next one is chosen from.
        session.position = min(_shared(session.tokens, tokens), input_ids.shape[1] - 1)
        session.fit(input_ids.shape[1])
        session.tokens = None
        cache = RemoteCache(session)
        cache.advance(session.position)
        result = self.transformers_model.generate(input_ids, past_key_values=cache, use_cache=True, **kwargs)
        self.drafts = decoding.drafts
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        if config.num_beams == 1 and sequences.shape[0] == session.batch_size:
            session.tokens = sequences[:, : session.position].tolist()
        return result

    def _total_length(self, prompt: int, kwargs: dict[str, Any]) -> int:
        """The tokens of a row at most, as transformers counts them."""
        model = self.transformers_model
        config, _ = merged_config(kwargs, model)
        if config.max_new_tokens:
            return prompt + int(config.max_new_tokens)
        own = (kwargs.get("generation_config"), model.generation_config)
        if kwargs.get("max_length") or any(one is not None and one.max_length for one in own):
            return max(int(config.max_length), prompt + 1)
        total: int = prompt + config.max_length  # of new tokens, where nobody gave it
        return min(total, getattr(model.config, "max_position_embeddings", None) or total)

    def _run_in_session(self, hidden: torch.Tensor, call: RemoteCall, cache: RemoteCache) -> torch.Tensor:
        context = forward_context()
        padding = call.left_padding or ()
        if padding and max(padding) >= call.position + hidden.shape[1]:
            raise BadInput("a row of the attention mask hides all of its tokens")
        session = cache.session
        if not isinstance(session, InferenceSession):
            raise BadInput("past_key_values is not supported: use generate(), or inference_session() and its step()")
        if session.left_padding not in (None, padding):
            raise BadInput(
                "this session began with other padding, which it keeps: open another with inference_session()"
            )
        if (context.prompts is not None or context.lora) and session.adapter is None:
            raise BadInput("deep prompts and LoRA have to be given when a session is opened: generate without session=")
        if call.layout.positions is None:
            _check_positions(call, hidden.shape[1])
        if session.position > call.position:
            session.position = call.position
        reorder = cache.take_reorder() or ()
        return session.step(
            hidden,
            reorder=reorder,
            left_padding=padding,
            outputs=call.outputs,
            layout=call.layout,
        )


def _check_positions(call: RemoteCall, tokens: int) -> None:
    """The servers count the positions of a session by themselves.

    Raises:
        BadInput: other ones were given.
    """
    given = call.position_ids
    if given is None:
        return
    expected = positions(tokens, call.position, call.attention_mask).to(given.device)
    seen = torch.ones_like(expected) if call.attention_mask is None else call.attention_mask[:, -tokens:] != 0
    if given.dim() != 2 or not bool(((given == expected) | (seen.to(given.device) == 0)).all()):
        raise BadInput(
            "position_ids are not supported in a session, which counts each row's tokens from its first one that the "
            "attention mask shows: leave them out, or call the model with use_cache=False"
        )


def _shared(held: list[list[int]] | None, wanted: list[list[int]]) -> int:
    """How many leading tokens all rows of `wanted` have in common with those of `held`."""
    if held is None or len(held) != len(wanted):
        return 0
    shared = min(len(held[0]), len(wanted[0]))
    for left, right in zip(held, wanted, strict=True):
        for index in range(shared):
            if left[index] != right[index]:
                shared = index
                break
    return shared
