from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from petalnode.node.client.chat import ChatMessage, Dialogue, Text, fit


def tokenize(turns: Sequence[ChatMessage]) -> list[int]:
    """A token per character, and one before each turn."""
    return [0 for turn in turns for _ in "|" + turn.content]


def spoken(*lengths: int, system: int | None = None) -> Dialogue:
    dialogue = Dialogue() if system is None else Dialogue().plus("system", "s" * system)
    for index, length in enumerate(lengths):
        dialogue = dialogue.plus("assistant" if index % 2 else "user", "x" * length)
    return dialogue


def test_what_fits_stays() -> None:
    dialogue = spoken(3, 4, 5)
    assert fit(dialogue, tokenize, 15) == (dialogue, [0] * 15, 0)


def test_the_oldest_question_goes_with_its_answer() -> None:
    left, tokens, dropped = fit(spoken(3, 4, 5, 6, 7), tokenize, 25)
    assert left == spoken(5, 6, 7) and len(tokens) == 21 and dropped == 2


def test_the_system_turn_stays() -> None:
    left, _, dropped = fit(spoken(3, 4, 5, system=10), tokenize, 18)
    assert left == spoken(5, system=10) and dropped == 2


def test_the_newest_question_is_never_dropped() -> None:
    left, tokens, dropped = fit(spoken(3, 4, 50), tokenize, 10)
    assert left == spoken(50) and len(tokens) == 51 and dropped == 2


def test_answer_that_was_stopped_is_followed_by_question() -> None:
    dialogue = Dialogue(
        (ChatMessage("user", "a"), ChatMessage("assistant", ""), ChatMessage("user", "b"), ChatMessage("user", "c"))
    )
    left, _, dropped = fit(dialogue, tokenize, 3)
    assert left.turns == (ChatMessage("user", "c"),) and dropped == 3


@given(
    st.lists(st.integers(0, 30), max_size=9).filter(lambda rows: len(rows) % 2),
    st.none() | st.integers(0, 9),
    st.integers(0, 99),
)
def test_what_is_left_is_end_of_what_was(lengths: list[int], system: int | None, limit: int) -> None:
    dialogue = spoken(*lengths, system=system)
    left, tokens, dropped = fit(dialogue, tokenize, limit)
    assert dropped == len(dialogue.turns) - len(left.turns) and tokens == tokenize(left.turns)
    assert left.turns[-1] == dialogue.turns[-1]
    kept = left.turns[1:] if system is not None else left.turns
    assert dialogue.turns[len(dialogue.turns) - len(kept) :] == kept
    assert kept[0].role == "user"
    assert len(tokens) <= limit or len(kept) == 1
    if dropped:  # no more went than had to
        before = dialogue.turns[len(dialogue.turns) - len(kept) - 2 :]
        assert len(tokenize(before)) + (0 if system is None else 1 + system) > limit


def test_text_goes_on_behind_damaged_bytes() -> None:
    """A line feed that is a byte is read as U+FFFD as soon as such a byte follows, after it was shown."""
    texts = ["<unk>", "x", "\u2581y", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    text = Text.__new__(Text)
    text._tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    stream = text.stream()
    shown = [stream.add(texts.index(token)) for token in ("x", "<0x0A>", "<0xF0>", "\u2581y", "\u2581y", "<0x0A>")]
    assert shown == ["x", "\n", "", "\ufffd y", " y", "\n"]
