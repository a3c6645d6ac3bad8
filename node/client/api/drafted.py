"""Drafts in the `generate` of the Python API: transformers' own processors and criteria, several tokens a step.

What transformers calls assisted generation, with the names that it has there. Its own loop asks one draft after the
other, waits for each, and draws other random numbers than without; this one keeps steps under way side by side, and the
tokens are those without drafts, sampled ones with the same seed too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
import trio
from transformers.cache_utils import DynamicCache
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ...blocks.client_part import ClientModel
from ...errors import BadInput
from ..chunks import from_chunks, to_chunks
from ..draft_model import PREFILL_TOKENS
from ..drafting import Draft, LookupDrafter
from ..request import WireTensor
from ..sampling import AheadSampler
from ..session.compared_session import Session
from ..session.session import ClientSession
from ..speculation import Answering, Drafter
from .inference_session import InferenceSession

STATELESS: Final = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
    )
)
"""Processors that may be asked about guesses as well: what they do depends on their arguments alone."""
_ANY_LENGTH: Final = 1 << 20


@dataclass(frozen=True)
class DraftOptions:
    """What `generate` was asked for: a model on this machine that guesses, beside what is looked up in the text; and
    what transformers hands on to no `custom_generate`."""

    assistant: Any = None
    streamer: Any = None


def take_draft_options(kwargs: dict[str, Any], model: Any) -> DraftOptions | None:
    """Takes transformers' arguments of assisted generation out of those of `generate`; None if there are none.

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
        return None
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
    return DraftOptions(assistant, kwargs.get("streamer"))


def drafted(kwargs: dict[str, Any], config: Any, decoding: Callable[..., Any]) -> dict[str, Any]:
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


class ProcessorSampler:
    """Chooses tokens as transformers' loop does: with its processors, criteria and the same random numbers.

    Attributes:
        is_over: a criterion has ended the answer.
        scores, logits: of each token, [1, vocabulary], where they are wanted.
    """

    def __init__(self, processors: Any, criteria: Any, config: Any, streamer: Any, device: torch.device) -> None:
        self.is_over = False
        keeps = bool(config.return_dict_in_generate)
        self.scores: tuple[torch.Tensor, ...] | None = () if keeps and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if keeps and config.output_logits else None
        self._processors = processors
        self._criteria = criteria
        self._samples = bool(config.do_sample)
        self._streamer = streamer
        self._device = device

    def prepare(self, *, draw: bool) -> None:
        """Nothing is known before the logits are."""

    @torch.no_grad()
    def next(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        """The token after `tokens`, from logits [vocabulary]; shows it to the criteria and to the streamer."""
        ids = self._ids(tokens)
        raw = logits.to(copy=True, dtype=torch.float32, device=self._device).unsqueeze(0)
        scores = self._processors(ids, raw)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (raw,)
        chosen = self._draw(tokens, scores.softmax(-1)) if self._samples else scores.argmax(-1)
        self.is_over = bool(self._criteria(torch.cat([ids, chosen[:, None]], dim=1), self.scores).all())
        self._chosen(chosen)
        return int(chosen)

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        """The text as processors and criteria see it, [1, tokens]."""
        return torch.tensor([tokens], device=self._device)

    def _draw(self, tokens: Sequence[int], probabilities: torch.Tensor) -> torch.Tensor:
        """The token after `tokens`, [1], of `probabilities` [1, vocabulary]."""
        return torch.multinomial(probabilities, 1)[0]

    def _chosen(self, token: torch.Tensor) -> None:
        if self._streamer is not None:
            self._streamer.put(token.cpu())

    def ahead(self) -> AheadSampler:
        """Draws the same random numbers, where those are the CPU's; knows no processor that keeps a state."""
        return _Ahead([one for one in self._processors if type(one) in STATELESS], self._samples, self._device)


class _Ahead:
    def __init__(self, processors: Sequence[Any], samples: bool, device: torch.device) -> None:
        self._processors = processors
        self._samples = samples
        self._generator = torch.Generator()
        if device.type == "cpu":
            self._generator.set_state(torch.get_rng_state())

    @torch.no_grad()
    def next(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        scores, ids = logits.float().cpu().unsqueeze(0), torch.tensor([tokens])
        for processor in self._processors:
            scores = processor(ids, scores)
        if not self._samples:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def skip(self, vocabulary: int) -> None:
        if self._samples:
            torch.multinomial(torch.ones(1, vocabulary), 1, generator=self._generator)


class DraftedDecoding:
    """The loop over tokens of one answer, for the argument `custom_generate` of transformers' `generate`."""

    def __init__(self, local: ClientModel, session: InferenceSession, options: DraftOptions) -> None:
        self._local = local
        self._session = session
        self._options = options
        self._mask: torch.Tensor | None = None

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
        streamer = self._options.streamer
        sampler = ProcessorSampler(logits_processor, stopping_criteria, generation_config, streamer, input_ids.device)
        tokens = self.answer(model, input_ids, sampler, int(generation_config.max_length), model_kwargs)
        if streamer is not None:
            streamer.end()
        sequences = torch.tensor([tokens], device=input_ids.device)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=sampler.scores,
            logits=sampler.logits,
            past_key_values=model_kwargs["past_key_values"],
        )

    def answer(
        self, model: Any, input_ids: torch.Tensor, sampler: ProcessorSampler, max_length: int, given: dict[str, Any]
    ) -> list[int]:
        """The tokens of `input_ids` [1, tokens] and those that follow, up to `max_length`; `given`: for the model."""
        cache = given["past_key_values"]
        new = input_ids.shape[1] - cache.get_seq_length()
        inputs = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=new, is_first_iteration=True, **given
        )
        logits = model(**inputs, return_dict=True).logits[0, -1]
        tokens: list[int] = input_ids[0].tolist()
        tokens.append(sampler.next(tokens, logits))
        if not sampler.is_over:
            self._mask = given.get("attention_mask")
            skipped = self._local.prompted_tokens + (0 if self._mask is None else int((self._mask[0] == 0).sum()))
            self._session.call(partial(self._decode, tokens, sampler, skipped, max_length))
        cache.advance(self._session.position - cache.get_seq_length())
        return tokens

    async def _decode(
        self, tokens: list[int], sampler: ProcessorSampler, skipped: int, max_length: int, session: Session
    ) -> None:
        """Extends `tokens` until `sampler` says that they are over, in the trio thread. A draft model does not get the
        first `skipped` ones."""
        stop = trio.Event()
        limit = min(max_length, session.spec.max_length + 1)
        answer = Answering(
            tokens, limit, sampler, lambda token: stop.set() if sampler.is_over else None, stop, frozenset()
        )
        reader = Assistant(self._options.assistant) if self._options.assistant is not None else None
        drafter = Drafter(self._session.drafting, LookupDrafter(), reader, skipped)
        embed = partial(self._embed, session)
        padding = 0 if self._mask is None else int((self._mask[0] == 0).sum())
        while True:
            made = len(tokens)
            answer.limit = self._local.draft_limit(made, limit, padding)
            if answer.is_over:
                break
            draft = drafter.guess(tokens, answer.limit - made - 1)
            session.position = min(session.position, made - 1)
            if self._local.refills(session.position, made):
                session.fit(made)
            together = drafter.plan.speed is not None and isinstance(session, ClientSession)
            if together and session.position == made - 1 and (draft.tokens or drafter.model_guesses(answer)):
                await drafter.check(answer, draft, cast(ClientSession, session), embed, self._local.head)
                if len(tokens) > made:
                    continue
                draft = Draft()  # nothing could be sent ahead
            session.position = start = min(session.position, made - 1)
            begun = trio.current_time()
            chunks = await trio.to_thread.run_sync(embed, [*tokens[start:], *draft.tokens], start)
            hidden = await session.step(chunks)
            answered = trio.current_time()
            await answer.check(partial(self._logits, hidden, 1 + len(draft.tokens)), draft.tokens)
            now = trio.current_time()
            drafter.note_speed(session, hidden[-1].tokens, now - answered)
            drafter.note_step(draft, len(tokens) - made - 1, now - begun)
        session.position = min(session.position, len(tokens) - 1)
        if not sampler.is_over:  # there is no room: the session says so
            await session.step(await trio.to_thread.run_sync(embed, tokens[-1:], len(tokens) - 1))

    def _embed(self, session: Session, some: list[int], position: int) -> list[WireTensor]:
        mask = self._mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones((1, position + len(some) - mask.shape[1]))], dim=1)
        hidden = self._local.embed(torch.tensor([some]), position, mask)
        return to_chunks(hidden, session.spec.codec, session.chunk_tokens(*hidden.shape[1:]))

    def _logits(self, hidden: Sequence[WireTensor], count: int) -> torch.Tensor:
        """Those of the last `count` tokens, [count, vocabulary]."""
        return self._local.head(from_chunks(list(hidden))[:, -count:])[0]
