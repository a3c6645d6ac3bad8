"""Examples from JSONL, rows of tokens, and what is done when: nothing here needs a swarm."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from petalnode.node.errors import BadInput
from petalnode.node.tuning.curve import CANVAS, LossCurve
from petalnode.node.tuning.dataset import Example, Message, read_dataset, split
from petalnode.node.tuning.recipe import SHAPES, EarlyStop, learning_rate, rows_of_step, steps_of_epoch
from petalnode.node.tuning.rows import IGNORED, PIECE, batch_of, beginning_of, pieces_of, rows_of
from tests.swarm.tokenizer import save_tokenizer


def written(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_the_three_kinds_of_lines(tmp_path: Path) -> None:
    mixed = read_dataset(written(tmp_path / "a", {"text": "t"}, "", {"prompt": "p", "completion": "c", "more": 1}))
    assert mixed.examples == (Example("t"), Example("c", prompt="p")) and mixed.labels == ()
    classes = read_dataset(written(tmp_path / "b", *({"text": "t", "label": label} for label in (10, "no", 9, 10))))
    assert classes.labels == ("9", "10", "no")
    assert classes.hash != mixed.hash


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: this is not JSON"),
        ("[]", "line 2: a line takes an object"),
        ({"txt": "t"}, 'line 2: "text" is missing; a line takes'),
        ({"text": ""}, 'line 2: "text" takes a text that is not empty'),
        ({"prompt": "p"}, 'line 2: "completion" is missing'),
        ({"prompt": 1, "completion": "c"}, 'line 2: "prompt" takes a text'),
        ({"text": "t", "label": 1.5}, 'line 2: "label" takes a text or a whole number'),
        ({"text": "t", "label": "x"}, "line 2: either all lines"),
        ({"messages": "hello"}, 'line 2: "messages" takes a list of objects'),
        ({"messages": [{"role": "robot", "content": "c"}]}, 'line 2: a message has a "role" of system, user'),
        ({"messages": [{"role": "user", "content": "q"}]}, 'line 2: "messages" takes a question and behind it'),
        ({"messages": [{"role": "assistant", "content": "a"}]}, 'line 2: "messages" takes a question and behind it'),
        ({"messages": [{"role": "user", "content": ["q"]}]}, 'line 2: "content" takes a text'),
        ({"messages": [{"role": "user", "weight": 2}]}, 'line 2: the "weight" of a message is 0 or 1'),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "line 2: calls of tools cannot be learned"),
    ],
)
def test_a_bad_line_is_named(line: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=says.replace("[", r"\[")):
        read_dataset(written(tmp_path / "data.jsonl", {"text": "good"}, line))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}')
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "marked").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert [example.text for example in read_dataset(tmp_path / "marked").examples] == ["a"]
    (tmp_path / "sheet.xlsx").touch()
    wrong = {"latin": "line 2: this is not UTF-8", "empty": "holds no examples", "none": "no file"}
    for name, says in (wrong | {"sheet.xlsx": "is an Excel file, and .*read_excel"}).items():
        with pytest.raises(BadInput, match=says):
            read_dataset(tmp_path / name)
    with pytest.raises(BadInput, match="folder"):
        read_dataset(tmp_path)


@given(count=st.integers(1, 60), share=st.floats(0, 0.9), seed=st.integers())
def test_a_split_loses_nothing(count: int, share: float, seed: int) -> None:
    examples = [Example(str(number)) for number in range(count)]
    train, held_out = split(examples, share, seed)
    assert sorted((*train, *held_out), key=lambda example: int(example.text)) == examples
    assert (train, held_out) == split(examples, share, seed)
    assert train and bool(held_out) == (share > 0 and count > 1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    found = AutoTokenizer.from_pretrained(folder)
    found.eos_token = "\n"
    return found


def test_rows(tokenizer: Any) -> None:
    def of(example: Example, length: int = 20, *, chat: bool = False) -> list[tuple[str, str]]:
        rows = rows_of([example], tokenizer, max_length=length, chat=chat)
        return [(tokenizer.decode(row.tokens[: row.given]), tokenizer.decode(row.tokens[row.given :])) for row in rows]

    assert of(Example("abc")) == [("", "abc\n")]
    assert of(Example("abcdefg"), 4) == [("", "abcd"), ("", "efg\n")]
    assert of(Example("abcdefgh"), 4) == [("", "abcd"), ("", "efgh")]  # one token alone has nothing before it
    assert of(Example("no", prompt="yes?")) == [("yes?", "no\n")]
    assert of(Example("no", prompt="yes?"), chat=True) == [("u:yes?\na:", "no\n")]
    assert of(Example("no", prompt="yes?"), 5) == [("yes?", "n")]
    assert of(Example("no", prompt="yes?"), 4) == []
    assert of(Example("no", prompt="")) == [("", "no\n")]
    [row] = rows_of([Example("abc", label="x")], tokenizer, max_length=2, chat=True, labels=("w", "x"))
    assert row.label == 1 and tokenizer.decode(row.tokens) == "ab"


def chat(*turns: tuple[str, str] | tuple[str, str, int]) -> Example:
    return Example(messages=tuple(Message(*turn) for turn in turns))


def learned(tokenizer: Any, example: Example, length: int = 99) -> list[tuple[str, str]]:
    """Each row, and what of it is learned."""
    rows = rows_of([example], tokenizer, max_length=length, chat=True)
    labels = batch_of(rows, 0).labels if rows else []
    return [
        (tokenizer.decode(row.tokens), tokenizer.decode([token for token in label.tolist() if token != IGNORED]))
        for row, label in zip(rows, labels, strict=True)
    ]


def test_of_a_conversation_the_answers_are_learned(tokenizer: Any) -> None:
    turns = ("system", "be kind"), ("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "2")
    whole = "s:be kind\nu:one?\na:1\nu:two?\na:2\n"
    assert learned(tokenizer, chat(*turns)) == [(whole, "12\n")]
    assert learned(tokenizer, chat(*turns[:2], ("assistant", "1", 0), *turns[3:])) == [(whole, "2\n")]
    assert learned(tokenizer, chat(*turns[:4], ("assistant", "2", 0))) == [("s:be kind\nu:one?\na:1\n", "1\n")]
    assert learned(tokenizer, chat(*turns), 22) == [(whole[:22], "1")]
    # A template that leaves the answers before the last one out gives each of them a row of its own.
    before, tokenizer.chat_template = (
        tokenizer.chat_template,
        (
            "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.role[0] }}:{{ m.content }}|{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
        ),
    )
    try:
        rows = learned(tokenizer, chat(*turns[1:]))
        assert rows == [("u:one?|a:1|\n", "1|\n"), ("u:one?|u:two?|a:2|\n", "2|\n")]
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(BadInput, match="the conversation that asks 'one\\?': roles must alternate"):
            learned(tokenizer, chat(*turns))
    finally:
        tokenizer.chat_template = before


def test_sample_goes_on_from_question_or_beginning(tokenizer: Any) -> None:
    rows = rows_of([Example("ab"), Example("no", prompt="yes?")], tokenizer, max_length=9, chat=False)
    assert tokenizer.decode(beginning_of(rows)) == "yes?"
    [row] = rows_of([Example("abcdef")], tokenizer, max_length=9, chat=False)
    assert tokenizer.decode(beginning_of([row])) == "abc"


@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("tsv", "\t")])
def test_table_is_refused_with_command_that_converts_it(ending: str, separator: str, tmp_path: Path) -> None:
    file = tmp_path / f"my data.{ending}"
    file.write_text(f'prompt{separator}completion\n"Who, me?"{separator}Yes\n')
    with pytest.raises(BadInput, match=f"is a {ending.upper()} file, and --data takes JSONL") as refused:
        read_dataset(file)
    command = str(refused.value).partition("with: ")[2].replace("python ", f"{sys.executable} ", 1)
    subprocess.run(["sh", "-c", command], check=True)
    assert read_dataset(tmp_path / "my data.jsonl").examples == (Example("Yes", prompt="Who, me?"),)


def test_parquet_is_refused_whatever_it_is_called(tmp_path: Path) -> None:
    for name, made in (("my data.parquet", "my data.jsonl"), ("a.jsonl", "a-converted.jsonl")):
        (tmp_path / name).write_bytes(b"PAR1....PAR1")
        with pytest.raises(BadInput, match=r"is a parquet file.*read_parquet") as refused:
            read_dataset(tmp_path / name)
        words = shlex.split(str(refused.value).partition(" && ")[2])
        assert words[:2] == ["python", "-c"] and words[3:] == [str(tmp_path / name), str(tmp_path / made)]
        compile(words[2], "the command", "exec")


def test_losses_are_drawn() -> None:
    curve = LossCurve()
    for step in range(1, 5000):
        curve.note(step, 3 + 1 / step)
    curve.held_out += [(0, 4.5), (2500, 3.25), (4999, 3.5)]
    assert len(curve.trained) <= CANVAS.points and curve.trained[0][0] == curve.stride and curve.trained[-1][0] > 4900
    root = ElementTree.fromstring(curve.to_svg())
    circles = [
        (float(one.get("cx", 0)), float(one.get("cy", 0))) for one in root.iter("{http://www.w3.org/2000/svg}circle")
    ]
    assert [x for x, _ in circles] == sorted(x for x, _ in circles) and circles[0][1] < circles[2][1] < circles[1][1]
    assert "held-out loss 4.500 -> 3.250" in "".join(root.itertext())
    for odd in (LossCurve(), LossCurve(held_out=[(0, 1.0)]), LossCurve(trained=[(1, float("nan")), (2, 1.0)])):
        ElementTree.fromstring(odd.to_svg())


def test_batches(tokenizer: Any) -> None:
    rows = rows_of([Example("ab", prompt="x"), Example("c")], tokenizer, max_length=9, chat=False)
    batch = batch_of(rows, 0)
    assert batch.ids.shape == batch.mask.shape == batch.labels.shape == (2, 4) and batch.tokens == 6
    assert batch.labels[0].tolist()[0] == IGNORED and batch.labels[1].tolist()[2:] == [IGNORED] * 2
    assert batch.mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert (batch.counted(0), batch.counted(4)) == (4, 5)


@given(rows=st.integers(1, 50), size=st.integers(1, 20), seed=st.integers(0, 9))
def test_an_epoch_has_each_row_once(rows: int, size: int, seed: int) -> None:
    steps = steps_of_epoch(rows, size)
    epochs = [[rows_of_step(epoch * steps + index, rows, size, seed) for index in range(steps)] for epoch in range(2)]
    for epoch in epochs:
        assert all(len(batch) == size for batch in epoch[:-1])
        assert sorted(number for batch in epoch for number in batch) == list(range(rows))


@given(st.integers(1, 200), st.integers(0, 50), st.sampled_from(SHAPES))
def test_learning_rates(steps: int, warmup: int, shape: Any) -> None:
    rates = [learning_rate(step, steps, peak=2.0, warmup=warmup, shape=shape) for step in range(steps)]
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup]) and rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert warmup >= steps or rates[warmup] == pytest.approx(2.0)


@given(st.lists(st.floats(0, 10), max_size=30), st.integers(1, 5))
def test_stopping_early(losses: list[float], patience: int) -> None:
    stop = EarlyStop(patience)
    for index, loss in enumerate(losses):
        stop = stop.after(loss)
        seen = losses[: index + 1]
        assert stop.best == min(seen)
        assert stop.is_over == (min(seen[: max(0, len(seen) - patience)], default=99) <= min(seen[-patience:]))
        assert stop.improved == (loss < min(seen[:-1], default=99))
        assert not EarlyStop(None, stop.best, stop.worse).is_over
        if stop.is_over:
            return


class Counting:
    """A tokenizer of one token per character, which notes how much it got at once."""

    eos_token_id = 1

    def __init__(self) -> None:
        self.longest = 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        self.longest = max(self.longest, len(text))
        return {"input_ids": [0] * add_special_tokens + [ord(letter) for letter in text]}


def test_line_of_any_length_loses_nothing() -> None:
    words = " ".join(str(number) for number in range(60_000))
    for text in (words, "x" * 200_000):
        assert "".join(pieces_of(text)) == text
        tokenizer, seen = Counting(), []
        rows = rows_of([Example(text)], tokenizer, max_length=1000, chat=False, progress=seen.append)
        assert tokenizer.longest <= PIECE and sum(seen) == len(text) and len(seen) > 3
        assert [token for row in rows for token in row.tokens] == [0, *map(ord, text), 1]
    assert all(piece.startswith(" ") for piece in list(pieces_of(words))[1:])
    for example in (Example(words, prompt=words), Example(words, label="a")):
        tokenizer = Counting()
        rows_of([example], tokenizer, max_length=10, chat=False, labels=["a"])
        assert tokenizer.longest <= 1280
