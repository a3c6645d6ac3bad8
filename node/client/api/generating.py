"""`generate` of the Python API by the loop over tokens: transformers prepares, and this makes the tokens.

Drafts are what transformers calls assisted generation, with the names that it has there. Its own loop asks one draft
after the other, waits for each, and draws other random numbers than without; here steps are under way side by side, and
the tokens are those without drafts, sampled ones with the same seed too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import torch
import trio
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ...blocks.client_part import ClientModel
from ...errors import BadInput
from ..generation.decoding import Embedding
from ..generation.draft_model import PREFILL_TOKENS
from ..generation.drafting import LookupDrafter
from ..generation.speculation import Answering, Drafter
from .inference_session import InferenceSession
from .processors import ProcessorSampler

KNOWN: Final = frozenset(
    {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "synced_gpus", "streamer"}
)
"""What transformers may hand over for the model that the loop honours at each token, or that is the same for all."""
_ANY_LENGTH: Final = 1 << 20


@dataclass(frozen=True)
class GenerateOptions:
    """What `generate` was asked for: whether there are drafts; a model on this machine that guesses them, beside what
    is looked up in the text; and what transformers hands on to no `custom_generate`."""

    drafts: bool = False
    assistant: Any = None
    streamer: Any = None


def take_draft_options(kwargs: dict[str, Any], model: Any) -> GenerateOptions:
    """Takes transformers' arguments of assisted generation out of those of `generate`.

    Raises:
        BadInput: they make no sense, or cannot be combined with the others.
    """
    lookup, assistant = kwargs.pop("prompt_lookup_num_tokens", None), kwargs.pop("assistant_model", None)
    config = kwargs.get("generation_config") or model.generation_config
    if getattr(config, "prompt_lookup_num_tokens", None) is not None:
        lookup = config.prompt_lookup_num_tokens if lookup is None else lookup
        kwargs["generation_config"] = config = deepcopy(config)
        config.prompt_lookup_num_tokens = None
    if lookup is None and assistant is None:
        return GenerateOptions(streamer=kwargs.get("streamer"))
    if lookup is not None and (isinstance(lookup, bool) or not isinstance(lookup, int) or lookup < 1):
        raise BadInput(f"prompt_lookup_num_tokens is {lookup}: give 1 or more, or leave it out for no drafts")
    if (kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1) > 1:
        raise BadInput(
            "beam search takes no drafts: leave out num_beams, or prompt_lookup_num_tokens and assistant_model"
        )
    if kwargs.get("use_cache") is False:
        raise BadInput("drafts are checked in a session: leave out use_cache=False, or the drafts")
    if kwargs.get("custom_generate") is not None:
        raise BadInput("custom_generate decides itself what is asked: leave it out, or the drafts")
    if assistant is not None:
        _check_assistant(assistant, model)
    return GenerateOptions(True, assistant, kwargs.get("streamer"))


def takes_loop(kwargs: dict[str, Any], default: Any) -> bool:
    """Whether transformers would make the answers token by token, in the loop for which this one stands."""
    given, config = kwargs.get("generation_config"), deepcopy(default)
    for name in vars(default):
        value = getattr(given, name, None) if kwargs.get(name) is None else kwargs[name]
        if value is not None:
            setattr(config, name, value)
    config.prompt_lookup_num_tokens = None  # of which `GenerateOptions` knows
    one_by_one = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    return kwargs.get("custom_generate") is None and config.get_generation_mode() in one_by_one


def with_loop(kwargs: dict[str, Any], config: Any, decoding: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of transformers' `generate` for which it decodes so."""
    strings, tokenizer = kwargs.get("stop_strings") or getattr(config, "stop_strings", None), kwargs.get("tokenizer")
    kwargs = {**kwargs, "custom_generate": decoding}
    if strings and tokenizer is not None:  # which transformers forgets beside a custom_generate
        kwargs["generation_config"] = config = deepcopy(config)
        kwargs["stop_strings"] = config.stop_strings = None
        kwargs["stopping_criteria"] = StoppingCriteriaList(
            [*(kwargs.get("stopping_criteria") or []), StopStringCriteria(tokenizer, strings)]
        )
    return kwargs


def _check_assistant(assistant: Any, model: Any) -> None:
    if not callable(assistant) or not hasattr(assistant, "config"):
        raise BadInput("assistant_model is a causal language model of transformers, loaded by from_pretrained")
    sizes = [one.config.get_text_config().vocab_size for one in (assistant, model)]
    if sizes[0] != sizes[1]:
        raise BadInput(
            f"assistant_model has a vocabulary of {sizes[0]} tokens and the model of the swarm one of {sizes[1]}: its "
            "guesses would mean other words; give a smaller model of the same family"
        )


class Assistant:
    """A model of transformers on this machine that reads one conversation, as `DraftReader`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        self._held: list[int] = []
        self.max_length: int = getattr(model.config, "max_position_embeddings", None) or _ANY_LENGTH

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """As `DraftReader.read` does it."""
        common = 0
        for held, wanted in zip(self._held, tokens[:-1], strict=False):
            if held != wanted:
                break
            common += 1
        if self._cache is None or (common < len(self._held) and not self._cache.is_croppable):
            self._cache, self._held, common = DynamicCache(config=self._model.config), [], 0
        if common < len(self._held):
            self._cache.crop(common - len(self._held))
            del self._held[common:]
        some = list(tokens[common : common + PREFILL_TOKENS])
        ids = torch.tensor([some], device=self._model.device)
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)
        self._held += some
        return out.logits[0, -1] if len(self._held) == len(tokens) else None


@dataclass(frozen=True)
class Prepared:
    """What transformers has prepared for its loop: `arguments` are those of the model."""

    model: Any
    processors: Any
    criteria: Any
    config: Any
    arguments: dict[str, Any]

    def by_transformers(self, input_ids: torch.Tensor, streamer: Any) -> Any:
        """What the loop of transformers makes of rows that go through one session together."""
        return type(self.model)._sample(
            self.model,
            input_ids,
            logits_processor=self.processors,
            stopping_criteria=self.criteria,
            generation_config=self.config,
            streamer=streamer,
            **self.arguments,
        )

    @property
    def is_known(self) -> bool:
        """Whether nothing is asked for that only the model's own forward pass has."""
        wanted = self.config.output_hidden_states or self.config.output_attentions
        return not wanted and {name for name, value in self.arguments.items() if value is not None} <= KNOWN


class RowDecoding:
    """The loop over tokens of one row, for the argument `custom_generate` of transformers' `generate`."""

    def __init__(self, local: ClientModel, session: InferenceSession, options: GenerateOptions) -> None:
        self._local = local
        self._session = session
        self._options = options

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers' own loop returns, for `input_ids` [1, tokens]."""
        prepared = Prepared(model, logits_processor, stopping_criteria, generation_config, model_kwargs)
        streamer, length = self._options.streamer, int(generation_config.max_length)
        # Where a long text begins, all of it is embedded anew, in a thread that has no prompts.
        embeds_anew = self._local.is_prompted and self._local.original_length is not None
        if not prepared.is_known or (embeds_anew and length > (self._local.original_length or 0)):
            return prepared.by_transformers(input_ids, streamer)
        sampler = ProcessorSampler(logits_processor, stopping_criteria, generation_config, streamer, input_ids.device)
        row = Row(self._local, self._session, self._options, sampler)
        tokens = row.begin(prepared, input_ids)
        self._session.call(lambda _: row.extend(length))
        cache = model_kwargs["past_key_values"]
        cache.advance(self._session.position - cache.get_seq_length())
        if streamer is not None:
            streamer.end()
        sequences = torch.tensor([tokens], device=input_ids.device)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences, scores=sampler.scores, logits=sampler.logits, past_key_values=cache
        )


class Row:
    """One row of `generate` in a session of its own: its prompt through the model, its tokens by the loop."""

    def __init__(
        self, local: ClientModel, session: InferenceSession, options: GenerateOptions, sampler: ProcessorSampler
    ) -> None:
        self._session = session
        self._local = local
        self._options = options
        self._sampler = sampler
        self._embedding = Embedding(local)
        self._tokens: list[int] = []
        self._skipped = 0

    @torch.no_grad()
    def begin(self, prepared: Prepared, input_ids: torch.Tensor) -> list[int]:
        """Runs the prompt [1, tokens], and chooses the first token behind it. Returns the list that will grow."""
        given = prepared.arguments
        cache, mask = given["past_key_values"], given.get("attention_mask")
        new = input_ids.shape[1] - cache.get_seq_length()
        inputs = prepared.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=new, is_first_iteration=True, **given
        )
        logits = prepared.model(**inputs, return_dict=True).logits[0, -1]
        self._tokens = input_ids[0].tolist()
        self._embedding = Embedding(self._local, mask=None if mask is None or bool((mask != 0).all()) else mask)
        self._skipped = self._local.prompted_tokens + self._embedding.padding
        self._tokens.append(self._sampler.next(self._tokens, logits))
        return self._tokens

    async def extend(self, length: int) -> None:
        """Makes the other tokens, up to `length` with the prompt, in the trio thread."""
        if self._sampler.is_over:
            return
        options, stop, drafter = self._options, trio.Event(), None
        if options.drafts:
            reader = Assistant(options.assistant) if options.assistant is not None else None
            drafter = Drafter(self._session.drafting, LookupDrafter(), reader, self._skipped)

        def on_token(token: int) -> None:
            if drafter is None:
                self._session.note_step()
            if self._sampler.is_over:
                stop.set()

        answer = Answering(self._tokens, length, self._sampler, on_token, stop, frozenset())
        await self._session.decode(answer, length, self._embedding, drafter)
