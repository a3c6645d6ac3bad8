"""Answers that have to look like something: masks over the vocabulary, by llguidance, where the head is."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ...errors import BadInput
from ..errors import ApiError

if TYPE_CHECKING:
    from .generation import Grammar

JSON_FORM: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As Python writes JSON. Blanks wherever JSON allows them let a weak model write nothing else."""

_LOCK: Final = threading.Lock()


@dataclass(frozen=True)
class GrammarLimits:
    """How many grammars are kept, and when a mask is made beside other work."""

    kept: int = 16
    """Grammars that stay ready for the next request with the same; a large one has some 10 MB."""
    quick_mask: float = 0.001
    """Seconds of processor time; usual masks take some 0.05 ms."""
    quick_masks: int = 4
    """This number of quick masks in a row lets the next one be computed on the trio thread. A grammar that is made to
    take long holds up other answers at one token in five at most."""
    probe_errors: int = 300
    """Characters of llguidance's explanation that a client is shown."""


GRAMMARS: Final = GrammarLimits()


class Grammars:
    """Makes constraints for one tokenizer. What it does takes up to a second, and belongs into a worker thread.

    Args:
        tokenizer: of transformers.
        vocabulary: entries of the logits; may be more than the tokenizer has tokens.
        stop_tokens: ids that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, stop_tokens: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stop_tokens = stop_tokens
        self._made: Any = None
        self._lock = threading.Lock()
        self._ready: OrderedDict[str, Any] = OrderedDict()

    def constraint(self, grammar: str) -> GrammarConstraint:
        """A new constraint by a grammar as `compiled` makes it. Raises ApiError."""
        return GrammarConstraint(self._matcher(grammar), self._vocabulary)

    def constraint_after(self, mark: str, grammar: str) -> ConstraintAfterMark:
        """A new constraint that binds only what follows `mark`, each time that it comes."""
        return ConstraintAfterMark(mark, self, grammar)

    def text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def compiled(self, wanted: Grammar) -> str:
        """What `constraint` takes.

        Raises:
            ApiError: llguidance cannot enforce it, or it is none.
        """
        from llguidance import LLMatcher

        try:
            if wanted.kind == "regex":
                grammar = LLMatcher.grammar_from_regex(wanted.text)
            elif wanted.kind == "choice":
                choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(wanted.text))
                grammar = LLMatcher.grammar_from_lark(f"start: {choices}")
            else:
                grammar = LLMatcher.grammar_from_json_schema(wanted.text, defaults=JSON_FORM)
        except ValueError as error:
            raise _refused(str(error)) from None
        return self.checked(grammar)

    def checked(self, grammar: str) -> str:
        """`grammar`, which has to be one that can be enforced. Raises ApiError."""
        self._matcher(grammar)
        return grammar

    def _matcher(self, grammar: str) -> Any:
        """One of its own, at the beginning. Raises ApiError."""
        from llguidance import LLMatcher

        with self._lock:
            found = self._ready.get(grammar)
            if found is not None:
                self._ready.move_to_end(grammar)
                return found.deep_copy()
        made = LLMatcher(self._vocabulary_of_grammars(), grammar)
        if made.is_error():
            raise _refused(made.get_error())
        with self._lock:
            self._ready[grammar] = made
            while len(self._ready) > GRAMMARS.kept:
                self._ready.popitem(last=False)
            return made.deep_copy()

    def _vocabulary_of_grammars(self) -> Any:
        with _LOCK:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper
        from llguidance.hf import from_tokenizer

        if not self._stop_tokens:
            raise BadInput("this model has no token that ends an answer, so none can be bound to a form")
        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=list(self._stop_tokens))
        except ValueError:  # a tokenizer that is neither by bytes nor with a fallback to them
            return LLTokenizer(
                TokenizerWrapper(_PlainTokenizer(self._tokenizer, self._vocabulary, self._stop_tokens[0]))
            )


class _PlainTokenizer:
    """A tokenizer whose tokens are texts, as llguidance reads one that it does not know."""

    def __init__(self, tokenizer: Any, vocabulary: int, stop_token: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = stop_token
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted({*tokenizer.all_special_ids, stop_token})
        known = len(tokenizer)
        self.tokens = [
            tokenizer.decode([token]).encode() if token < known else f"<unused {token}>".encode()
            for token in range(vocabulary)
        ]
        self.special_token_ids += range(known, vocabulary)

    def __call__(self, text: str | bytes) -> list[int]:
        given = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return list(self._tokenizer(given, add_special_tokens=False)["input_ids"])


class GrammarConstraint:
    """Of one answer. `prepare` may run in another thread than the other calls, also later than it was asked for.

    Attributes:
        done: nothing may follow.
    """

    # What computes a mask has the matcher for itself: whoever asks it anything meanwhile gets an error, so that it is
    # asked with the lock only, and what is asked at every token (`done`) is noted.

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros((vocabulary + 31) // 32, dtype=np.int32)
        self._forbidden: torch.Tensor | None = None
        self._only: int | None = None
        self._quick = 0  # masks since the last one that took long
        self._lock = threading.Lock()
        self._problem: str | None = None
        self.done = False
        self._note()

    @property
    def is_ready(self) -> bool:
        """As `PreparedConstraint` says; does not wait for who computes a mask."""
        return self._forbidden is not None

    @property
    def is_quick(self) -> bool:
        """As `PreparedConstraint` says: the last masks have taken so little that another thread is not worth waking."""
        return self._quick >= GRAMMARS.quick_masks

    @property
    def only(self) -> int | None:
        """As `PreparedConstraint` says."""
        return self._only if self._forbidden is not None and self._problem is None else None

    def prepare(self) -> None:
        """Computes the mask of the next token, while the servers compute its logits. Never raises."""
        with self._lock:
            if self._forbidden is None:
                begun = time.thread_time()
                self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
                self._quick = self._quick + 1 if time.thread_time() - begun < GRAMMARS.quick_mask else 0
                self._note()
                self._only = only_bit(self._mask)
                self._forbidden = torch.from_numpy(np.unpackbits(self._mask.view(np.uint8), bitorder="little") == 0)

    def apply(self, scores: torch.Tensor) -> None:
        """As `Constraint` says. Raises ApiError if llguidance gives up."""
        self.prepare()
        self._check()
        assert self._forbidden is not None
        forbidden = self._forbidden[: len(scores)]
        scores[: len(forbidden)].masked_fill_(forbidden, float("-inf"))
        scores[len(forbidden) :] = float("-inf")

    def accept(self, token: int) -> None:
        with self._lock:
            self._forbidden = None
            self._matcher.consume_token(token)
            self._note()
        self._check()

    @property
    def complete(self) -> bool:
        """Whether what there is follows the grammar, and may end here."""
        with self._lock:
            return self.done or bool(self._matcher.is_accepting())

    def _note(self) -> None:
        self.done = bool(self._matcher.is_stopped())
        self._problem = self._matcher.get_error() if self._matcher.is_error() else None

    def _check(self) -> None:
        if self._problem is not None:
            raise _refused(self._problem)


def only_bit(mask: npt.NDArray[np.int32]) -> int | None:
    """The place of the only bit that is set; None if there is not exactly one."""
    (words,) = mask.nonzero()
    if len(words) != 1:
        return None
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * int(words[0]) + word.bit_length() - 1


class ConstraintAfterMark:
    """Lets everything through up to a mark, then what a grammar allows, then everything again.

    A token that ends the mark and goes on behind it leaves what follows free.

    Attributes:
        done: never, as the model ends such an answer itself.
    """

    done = False

    def __init__(self, mark: str, grammars: Grammars, grammar: str) -> None:
        self._mark = mark
        self._grammars = grammars
        self._grammar = grammar
        self._tail = ""
        self._begins = False  # the mark was said, and `bound` is not made yet, which takes long
        self._bound: GrammarConstraint | None = None
        self._lock = threading.Lock()

    @property
    def is_ready(self) -> bool:
        """As that of `GrammarConstraint`."""
        bound = self._bound
        return not self._begins and (bound is None or bound.is_ready)

    @property
    def is_quick(self) -> bool:
        """As that of `GrammarConstraint`."""
        bound = self._bound
        return not self._begins and (bound is None or bound.is_quick)

    @property
    def only(self) -> int | None:
        """As that of `GrammarConstraint`."""
        bound = self._bound
        return bound.only if bound is not None else None

    def prepare(self) -> None:
        """As that of `GrammarConstraint`."""
        try:
            bound = self._begun()
        except ApiError:  # `apply` says so
            return
        if bound is not None:
            bound.prepare()

    def apply(self, scores: torch.Tensor) -> None:
        """As `Constraint` says."""
        bound = self._begun()
        if bound is not None:
            bound.apply(scores)

    def accept(self, token: int) -> None:
        bound = self._begun()
        if bound is not None:
            bound.accept(token)
            if bound.complete:
                self._bound = None
            return
        text = self._tail + self._grammars.text(token)
        _, found, behind = text.rpartition(self._mark)
        self._begins = bool(found) and not behind
        self._tail = "" if self._begins else text[-(len(self._mark) - 1) :]

    def _begun(self) -> GrammarConstraint | None:
        """What binds the next token. Raises ApiError."""
        with self._lock:
            if self._begins:
                self._bound = self._grammars.constraint(self._grammar)
                self._begins = False
            return self._bound


AnyConstraint = GrammarConstraint | ConstraintAfterMark


def _refused(problem: str) -> ApiError:
    text = " ".join(problem.split())[: GRAMMARS.probe_errors]
    return ApiError(400, f"this form cannot be enforced: {text}", param="response_format", code="invalid_schema")
