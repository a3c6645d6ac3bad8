"""`generate` of the Python API by the loop over tokens: transformers prepares, and this makes the tokens.

Rows of a batch go on together in one session, with one message a step. With drafts, where they pay (`row_drafts`), each
row has a session of its own, in a task. The tokens are those of transformers' loop, with the same random numbers,
whichever it is.

Drafts are what transformers calls assisted generation, with the names that it has there. Its own loop asks one draft
after the other, waits for each, and draws other random numbers than without. Here steps are under way side by side. The
tokens are those without drafts, sampled ones with the same seed too.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import trio
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from ...blocks.client_part import ClientModel
from ...blocks.images.encoder import ImagePrompt
from ...blocks.remote_cache import RemoteCache
from ...errors import BadInput, unwrapped
from ...swarm.cost import Estimate
from ..generation.decoding import Embedding
from ..generation.draft_model import PREFILL_TOKENS, DraftReader, FixedDrafts
from ..generation.drafting import DraftCounts, LookupDrafter
from ..generation.mtp_head import mtp_reader
from ..generation.sampling import Token
from ..generation.speculation import Answering, Drafter
from ..session.prefixes import common_prefix
from .inference_session import InferenceSession
from .processors import Answers, Prepared, ProcessorSampler, RowDraws
from .remote import RemoteSequential
from .row_drafts import ROWS, draft_apart, seen_gain

_ONE_BY_ONE: Final = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_NAMED: Final = frozenset(inspect.signature(GenerationMixin.generate).parameters)
_OF_THE_MODEL: Final = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep", "tokenizer"})
"""Arguments for the model that the loop honours at each token, or that concern the prompt alone."""
_ANY_LENGTH: Final = 1 << 20


@dataclass(frozen=True)
class GenerateOptions:
    """What `generate` was asked for: whether there are drafts; a model on this machine, or `mtp_head` of the model,
    that guesses them beside what is looked up; how long they are, if not as long as it pays; and what transformers
    hands on to no `custom_generate`."""

    drafts: bool = False
    assistant: Any = None
    mtp_head: bool = False
    fixed: FixedDrafts | None = None
    streamer: Any = None


def take_draft_options(kwargs: dict[str, Any], model: Any) -> GenerateOptions:
    """Takes transformers' arguments of assisted generation out of those of `generate`.

    Raises:
        BadInput: they make no sense, or cannot be combined with the others.
    """
    lookup, assistant = kwargs.pop("prompt_lookup_num_tokens", None), kwargs.pop("assistant_model", None)
    config = kwargs.get("generation_config") or model.generation_config
    own = kwargs.pop("use_mtp", None)
    if getattr(config, "prompt_lookup_num_tokens", None) is not None or getattr(config, "use_mtp", None):
        lookup = config.prompt_lookup_num_tokens if lookup is None else lookup
        own = config.use_mtp if own is None else own
        kwargs["generation_config"] = config = deepcopy(config)
        config.prompt_lookup_num_tokens = config.use_mtp = None
    if lookup is None and assistant is None and not own:
        return GenerateOptions(streamer=kwargs.get("streamer"))
    if lookup is not None and (isinstance(lookup, bool) or not isinstance(lookup, int) or lookup < 1):
        raise BadInput(f"prompt_lookup_num_tokens is {lookup}: give 1 or more, or leave it out for no drafts")
    if (kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1) > 1:
        raise BadInput(
            "beam search takes no drafts: leave out num_beams, or prompt_lookup_num_tokens, assistant_model and use_mtp"
        )
    if kwargs.get("use_cache") is False:
        raise BadInput("drafts are checked in a session: leave out use_cache=False, or the drafts")
    if kwargs.get("custom_generate") is not None:
        raise BadInput("custom_generate decides itself what is asked: leave it out, or the drafts")
    if assistant is not None and own:
        raise BadInput("assistant_model and use_mtp each name what guesses: leave out one of them")
    if assistant is not None:
        _check_assistant(assistant, model)
    fixed = _fixed_drafts(kwargs, lookup is not None)
    return GenerateOptions(True, assistant, bool(own), fixed, kwargs.get("streamer"))


def _fixed_drafts(kwargs: Mapping[str, Any], looked_up: bool) -> FixedDrafts | None:
    """Drafts of constant length, if the caller asks for them. Raises BadInput."""
    tokens = kwargs.get("num_assistant_tokens")
    if kwargs.get("num_assistant_tokens_schedule") != "constant" or tokens is None:
        return None
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise BadInput(f"num_assistant_tokens is {tokens}: give 1 or more, or leave it out")
    return FixedDrafts(tokens if looked_up else 0, tokens)


def merged_config(kwargs: Mapping[str, Any], model: Any) -> tuple[GenerationConfig, Mapping[str, Any]]:
    """What transformers' `generate` does with these arguments, whoever gave them; and those for the model.

    What neither the arguments nor their `generation_config` say is as in the model's own.
    """
    given = {name: value for name, value in kwargs.items() if name not in _NAMED and value is not None}
    config, arguments = model._prepare_generation_config(kwargs.get("generation_config"), **given)
    return config, arguments


def takes_loop(kwargs: Mapping[str, Any], config: GenerationConfig, arguments: Mapping[str, Any]) -> bool:
    """Whether the answers of `generate` are made by the loop over tokens. Greedy and sampled ones are, if nothing is
    given that only the whole model takes. Beam search and loops of the caller's own are left to transformers."""
    config.prompt_lookup_num_tokens = None  # of which `GenerateOptions` knows
    one_by_one = config.get_generation_mode() in _ONE_BY_ONE
    return one_by_one and kwargs.get("custom_generate") is None and arguments.keys() <= _OF_THE_MODEL


def with_loop(kwargs: dict[str, Any], model: Any, decoding: BatchDecoding) -> dict[str, Any]:
    """The arguments of transformers' `generate` for which it decodes so."""
    config = kwargs.get("generation_config") or model.generation_config
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
        common = common_prefix(self._held, tokens[:-1])
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


@dataclass(eq=False)
class RowGroup:
    """Rows that go on together in one session: their prompts through the model, their tokens by the loop.

    Attributes:
        tokens: of the text, from the first that is not hidden on.
        skipped: those at its beginning that a draft model does not know.
        reader: of what guesses beside the text.
    """

    local: ClientModel
    session: InferenceSession
    prepared: Prepared
    sampler: ProcessorSampler
    options: GenerateOptions
    tokens: list[Token] = field(default_factory=list)
    skipped: int = 0
    reader: DraftReader | None = None

    @torch.no_grad()
    def begin(self) -> Embedding:
        """Runs the prompts, and chooses the first token behind them. Not in the trio thread."""
        prepared, given = self.prepared, self.prepared.arguments
        mask, ids = given.get("attention_mask"), prepared.input_ids[:, prepared.hidden :]
        new = ids.shape[1] - given["past_key_values"].get_seq_length()
        inputs = prepared.model.prepare_inputs_for_generation(
            ids, next_sequence_length=new, is_first_iteration=True, **given
        )
        logits = prepared.model(**inputs, return_dict=True).logits[:, -1]
        self.tokens = ids[0].tolist() if len(ids) == 1 else list(zip(*ids.tolist(), strict=True))
        self.tokens.append(self.sampler.next(self.tokens, logits.squeeze(0)))
        whole = mask is None or bool((mask != 0).all())
        prompt = self.local.prompt
        pictures = prompt if isinstance(prompt, ImagePrompt) else None
        embedding = Embedding(self.local, pictures, None if whole else mask, len(ids))
        self.skipped = (0 if prompt is None else prompt.tokens) + embedding.padding
        if self.options.assistant is not None:
            self.reader = Assistant(self.options.assistant)
        elif self.options.mtp_head and (reader := mtp_reader(self.local, self.session.max_length)) is not None:
            reader.note(self.tokens[self.skipped : -1], given["past_key_values"].last[0])
            self.reader = reader
        return embedding

    async def extend(self, embedding: Embedding) -> None:
        """Makes the other tokens, in the trio thread."""
        if self.sampler.is_over:
            return
        session, options, drafter = self.session, self.options, None
        if options.drafts:
            session.drafting.fixed = options.fixed
            drafter = Drafter(session.drafting, LookupDrafter(), self.reader, self.skipped)
        length = int(self.prepared.config.max_length) - self.prepared.hidden
        answer = Answering(self.tokens, length, self.sampler)
        await session.decode(answer, length, embedding, drafter)

    async def run(self) -> None:
        """From the prompts to the end, which gives the servers their cache back."""
        await self.extend(await trio.to_thread.run_sync(self.begin))
        await trio.to_thread.run_sync(self.session.close)


@dataclass(eq=False)
class BatchDecoding:
    """The loop over tokens in the place of transformers' own, for the argument `custom_generate` of its `generate`.

    Attributes:
        session: of all rows, or of the first of them.
        gain: of drafts in the batches before.
        may_part: whether rows may go on in several sessions.
        drafts: what drafts have brought, as `DistributedModelForCausalLM.drafts`.
    """

    local: ClientModel
    blocks: RemoteSequential
    session: InferenceSession
    options: GenerateOptions
    gain: Estimate
    may_part: bool
    drafts: dict[str, Any] = field(default_factory=DraftCounts().fields)

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers' own loop returns, for `input_ids` [rows, tokens]."""
        config, cache = generation_config, model_kwargs["past_key_values"]
        prepared = Prepared(model, input_ids, logits_processor, stopping_criteria, config, model_kwargs)
        padding = config._pad_token_tensor
        answers = Answers(len(input_ids), 0 if padding is None else int(padding), self.options.streamer)
        apart = self._parts(prepared)
        drafts = self.options.drafts and (apart or len(input_ids) == 1)
        options = replace(self.options, drafts=drafts, mtp_head=drafts and self.options.mtp_head)
        if not apart:
            sampler = ProcessorSampler(prepared, answers)
            self._run_together(RowGroup(self.local, self.session, prepared, sampler, options))
            scores, logits = sampler.scores, sampler.logits
            cache.advance(self.session.position - cache.get_seq_length())
        else:
            self._run_apart(prepared, answers, options)
            scores = logits = None
        if self.options.drafts and len(input_ids) > 1:
            known = drafts or self.options.assistant is None
            accepted = self.drafts["accepted"] if drafts else None
            self.gain.note(seen_gain(input_ids.tolist(), answers.made, accepted, known))
        if self.options.streamer is not None:
            self.options.streamer.end()
        sequences = answers.behind(input_ids)
        if not config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, past_key_values=cache)

    def _parts(self, prepared: Prepared) -> bool:
        """Whether rows go on each in a session of its own, with drafts."""
        rows, options = len(prepared.input_ids), self.options
        if rows == 1 or not options.drafts or not self.may_part or not prepared.is_by_row:
            return False
        if options.fixed is not None and rows <= ROWS.most_drafted:
            return True
        return draft_apart(rows, *self.blocks.stages(rows, int(prepared.config.max_length)), self.gain.value)

    def _run_together(self, part: RowGroup) -> None:
        """All rows in one session; prompts go through the model in the caller's thread, which may be `prompted`."""
        before = part.session.drafting.counts
        embedding = part.begin()
        part.session.call(part.extend, embedding)
        self.drafts = (part.session.drafting.counts - before).fields()

    def _run_apart(self, prepared: Prepared, answers: Answers, options: GenerateOptions) -> None:
        """Each row in a session of its own. Raises the first error of one, after all have ended."""
        rows = len(prepared.input_ids)
        draws = RowDraws(rows)
        parts: list[RowGroup] = []
        with ExitStack() as stack:
            for index, plan in enumerate(self.session.drafting.of_rows(rows)):
                cache = RemoteCache(self.session)
                own = prepared.part(slice(index, index + 1), cache)
                if index:
                    length = self.session.max_length - own.hidden
                    cache.session = stack.enter_context(self.blocks.inference_session(length))
                session: InferenceSession = cache.session
                session.drafting = plan
                sampler = ProcessorSampler(own, answers, index, draws)
                parts.append(RowGroup(self.local, session, own, sampler, options))
            self.session.runtime.call(_run_all, parts)
        if prepared.config.do_sample:
            draws.finish(max(map(len, answers.made)))
        counts = [part.session.drafting.counts for part in parts]
        self.drafts = {**sum_of(counts).fields(), "rows": [one.fields() for one in counts]}


async def _run_all(parts: Sequence[RowGroup]) -> None:
    with unwrapped(Exception):
        async with trio.open_nursery() as nursery:
            for part in parts:
                nursery.start_soon(part.run)


def sum_of(rows: Sequence[DraftCounts]) -> DraftCounts:
    """Of rows that were made at the same time: their tokens together, and the seconds of the one that gained least."""
    total = DraftCounts()
    for one in rows:
        total = total.plus(drafted=one.drafted, accepted=one.accepted, steps=one.steps)
    return total.plus(gained=min((one.gained for one in rows), default=0.0))
