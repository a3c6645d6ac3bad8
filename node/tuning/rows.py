"""Examples as rows of tokens, with what of them is learned, and padded batches of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..errors import BadInput
from .dataset import Example, Message

if TYPE_CHECKING:
    import torch

PIECE: Final = 1 << 16
"""Characters that a tokenizer gets at once."""
_CHARACTERS_PER_TOKEN: Final = 128
"""More than any token has in a text, on average."""
_BEGINNING: Final = 16
"""Tokens of a text without a question that a sample goes on from."""
IGNORED: Final = -100
"""The label of a token that is not to be learned, in transformers."""


@dataclass(frozen=True)
class TokenRow:
    """The tokens of one example. The first `given` tokens are not learned, nor those of the spans `silent`; `label` is
    the index of its class."""

    tokens: tuple[int, ...]
    given: int = 0
    label: int | None = None
    silent: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class TrainingBatch:
    """Rows padded at the right.

    Attributes:
        ids, mask: int64 [rows, tokens].
        labels: int64 [rows, tokens], IGNORED where nothing is learned; of classes [rows].
        tokens: that are not padding.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor
    tokens: int

    def counted(self, prefix: int) -> int:
        """The number of values in the mean loss. Without virtual tokens (`prefix`) the first token is not predicted."""
        if self.labels.dim() == 1:
            return len(self.labels)
        return int((self.labels[:, 0 if prefix else 1 :] != IGNORED).sum())


def rows_of(
    examples: Sequence[Example],
    tokenizer: Any,
    *,
    max_length: int,
    chat: bool,
    labels: Sequence[str] = (),
    progress: Callable[[int], object] = lambda characters: None,
) -> list[TokenRow]:
    """Rows of 2 to `max_length` tokens.

    Longer texts are split into several rows. A prompt and completion that are too long are truncated. Rows without a
    token to learn are left out. The tokenizer gets a piece of bounded length at a time. So a signal is not held up for
    long.

    Args:
        chat: prompts and completions are turns of the tokenizer's chat template. Messages always are.
        labels: the classes, by their numbers.
        progress: is called with the number of characters whenever some are done.

    Raises:
        BadInput: the chat template refuses a conversation.
    """
    rows: list[TokenRow] = []
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    most = max_length * _CHARACTERS_PER_TOKEN  # beyond these, all would be truncated
    for example in examples:
        if example.prompt is not None or example.messages:
            turns = example.messages or (Message("user", example.prompt or ""), Message("assistant", example.text))
            if chat or example.messages:
                rows += conversation_rows(_first(turns, most), tokenizer, end, max_length)
            else:
                given = (example.prompt or "")[:most]
                rows.append(_row([given], [example.text[:most]], tokenizer, end, max_length))
            progress(example.characters)
            continue
        if example.label is not None:
            tokens = list(tokenizer(example.text[:most])["input_ids"])
            rows.append(TokenRow(tuple(tokens[:max_length]), label=labels.index(example.label)))
            progress(len(example.text))
            continue
        tokens = []
        for piece in pieces_of(example.text):
            if end and tokens[-1:] == end:  # the tokenizer sets it behind each piece
                tokens.pop()
            tokens += tokenizer(piece, add_special_tokens=not tokens)["input_ids"]
            progress(len(piece))
        tokens += [] if tokens[-1:] == end else end
        rows += [TokenRow(tuple(tokens[start : start + max_length])) for start in range(0, len(tokens), max_length)]
    return [row for row in rows if _teaches(row)]


def pieces_of(text: str) -> Iterator[str]:
    """The text in pieces of at most `PIECE` characters. Each but the last is cut before white space if there is any."""
    start = 0
    while len(text) - start > PIECE:
        cut = max(text.rfind(space, start + 1, start + PIECE) for space in (" ", "\n"))
        cut = cut if cut > start else start + PIECE
        yield text[start:cut]
        start = cut
    yield text[start:]


def _teaches(row: TokenRow) -> bool:
    if row.label is not None:
        return bool(row.tokens)
    return len(row.tokens) > max(row.given, 1)


def _first(messages: Sequence[Message], most: int) -> Sequence[Message]:
    """The first of them, of about `most` characters: templates are filled in once for each answer."""
    total = 0
    for number, message in enumerate(messages):
        total += len(message.content)
        if total > most:
            return (*messages[:number], Message(message.role, message.content[:most], message.weight))
    return messages


def conversation_rows(
    messages: Sequence[Message], tokenizer: Any, end: Sequence[int], max_length: int
) -> list[TokenRow]:
    """One row with all answers to learn. Some templates write a turn otherwise once others follow it (without its
    thoughts, say). Then there is one row for each answer, as it is when given."""
    whole = _templated(messages, tokenizer)
    spans = []
    for number, message in enumerate(messages):
        if message.is_learned:
            before = _templated(messages[:number], tokenizer, asking=True)
            after = _templated(messages[: number + 1], tokenizer).rstrip()
            differs = (at for at, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
            spans.append((after, next(differs, min(len(before), len(after)))))
    if all(whole.startswith(after) for after, _ in spans):
        ends = [0, *(len(after) for after, _ in spans)]
        given = [whole[stop:start] for stop, (_, start) in zip(ends, spans, strict=False)]
        return [_row(given, [after[start:] for after, start in spans], tokenizer, end, max_length, chat=True)]
    return [_row([after[:start]], [after[start:]], tokenizer, end, max_length, chat=True) for after, start in spans]


def _templated(messages: Sequence[Message], tokenizer: Any, *, asking: bool = False) -> str:
    from jinja2.exceptions import TemplateError  # `petalnode tune --help` does without

    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text: str = tokenizer.apply_chat_template(turns, add_generation_prompt=asking, tokenize=False)
    except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
        first = next((message.content for message in messages if message.role == "user"), "")
        raise BadInput(
            f"the model's chat template refuses the conversation that asks {first[:60]!r}: {error}"
        ) from None
    return text


def _row(
    given: Sequence[str],
    learned: Sequence[str],
    tokenizer: Any,
    end: Sequence[int],
    max_length: int,
    *,
    chat: bool = False,
) -> TokenRow:
    """A row of texts that are given and learned in turn. The end token follows, unless the template has an end of its
    own."""
    tokens: list[int] = []
    starts, stops = [], []
    for before, text in zip(given, learned, strict=True):
        tokens += tokenizer(before, add_special_tokens=not chat)["input_ids"] if before else []
        starts.append(len(tokens))
        tokens += tokenizer(text, add_special_tokens=False)["input_ids"]
        stops.append(len(tokens))
    special = {*end, *(getattr(tokenizer, "all_special_ids", ()) if chat else ())}
    tokens += [] if chat and tokens[-1:] and tokens[-1] in special else end
    return TokenRow(tuple(tokens[:max_length]), starts[0], silent=tuple(zip(stops, starts[1:], strict=False)))


def beginning_of(rows: Sequence[TokenRow]) -> tuple[int, ...]:
    """What a sample goes on from: the tokens before the first answer of a row, or some of the first ones of a text."""
    row = next((row for row in rows if row.given), rows[0])
    return row.tokens[: row.given or min(_BEGINNING, max(1, len(row.tokens) // 2))]


def batch_of(rows: Sequence[TokenRow], padding: int) -> TrainingBatch:
    """Rows padded with the token id `padding`."""
    import torch  # `petalnode tune --help` does without

    length = max(len(row.tokens) for row in rows)
    ids = torch.full((len(rows), length), padding)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORED)
    for index, row in enumerate(rows):
        tokens = torch.tensor(row.tokens)
        ids[index, : len(tokens)] = tokens
        mask[index, : len(tokens)] = 1
        labels[index, row.given : len(tokens)] = tokens[row.given :]
        for start, stop in row.silent:
            labels[index, start:stop] = IGNORED
    classes = [row.label for row in rows if row.label is not None]
    if classes:
        labels = torch.tensor(classes)
    return TrainingBatch(ids, mask, labels, int(mask.sum()))
