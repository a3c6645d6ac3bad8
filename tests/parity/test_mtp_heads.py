"""A model's MTP head computes what transformers' does, and follows its text back and forth."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from petalnode.node.blocks.client_part import load_client
from petalnode.node.client.generation.draft_model import PREFILL_TOKENS
from petalnode.node.client.generation.mtp_head import MtpReader, mtp_head, mtp_reader
from tests.greedy import prompt
from tests.mtp_heads import HEADS, save_with_head
from tests.tiny_models import HIDDEN, NUM_BLOCKS, load_whole, save_tiny

LENGTH = PREFILL_TOKENS + 20


def reader_of(folder: Path) -> MtpReader:
    reader = mtp_reader(load_client(folder), 256)
    assert reader is not None
    return reader


def read(reader: MtpReader, line: list[int]) -> torch.Tensor:
    while (logits := reader.read(line)) is None:
        pass
    return logits


@pytest.fixture(scope="module", params=HEADS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_head(request.param, tmp_path_factory.mktemp("heads") / request.param)


@torch.no_grad()
def left_last_block(whole: Any, tokens: list[int]) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    hook = whole.model.norm.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    whole(torch.tensor([tokens]))
    hook.remove()
    return seen[0][0]


@pytest.mark.parametrize("architecture", ["deepseek_v3", "glm4_moe"])
def test_the_logits_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    folder = save_with_head(architecture, tmp_path)
    whole, line = load_whole(folder), prompt(1, LENGTH)[0].tolist()
    whole._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{NUM_BLOCKS}\."]
    theirs, cache = MtpModel.from_pretrained(whole), MtpCache(config=whole.config.get_mtp_config())
    hidden, positions = left_last_block(whole, line[:-1]), torch.arange(1, LENGTH).unsqueeze(0)
    with torch.no_grad():
        _, expected, _ = theirs(torch.tensor([line[1:]]), whole.model.norm(hidden).unsqueeze(0), None, positions, cache)
    reader = reader_of(folder)
    reader.note(line[:-1], hidden)
    torch.testing.assert_close(read(reader, line), expected[0, 0], atol=1e-5, rtol=1e-4)


def test_what_is_guessed_depends_on_the_text_alone(folder: Path) -> None:
    """Not on what was read before: other tokens, guesses, or the same text piece by piece."""
    whole, text = load_whole(folder), prompt(1, LENGTH)[0].tolist()
    other = [*text[:30], *prompt(1, 20, seed=1)[0].tolist()]
    reader = reader_of(folder)
    for line, known, new in (
        (other, 40, 40),
        (other, 41, 1),
        (text, 29, 29),
        (text, 30, 1),
        (text, LENGTH - 5, LENGTH - 35),
        (text, LENGTH - 4, 1),
        (text, LENGTH - 1, 3),
    ):
        hidden, fresh = left_last_block(whole, line[:known]), reader_of(folder)
        reader.note(line[:known], hidden[-new:])
        fresh.note(line[:known], hidden)
        for end in range(known + 1, min(known + 4, len(line)) + 1):
            torch.testing.assert_close(read(reader, line[:end]), read(fresh, line[:end]), atol=1e-4, rtol=1e-3)


def test_it_begins_where_the_hidden_states_do(folder: Path) -> None:
    """As behind the part of a prompt that servers had kept."""
    whole, text = load_whole(folder), prompt(1, 40)[0].tolist()
    hidden = left_last_block(whole, text[:-1])
    late, early = reader_of(folder), reader_of(folder)
    late.note(text[:-1], hidden[-10:])
    early.note(text[-11:-1], hidden[-10:])
    torch.testing.assert_close(read(late, text), read(early, text[-11:]), atol=1e-4, rtol=1e-4)
    late.note([*text, 5, 6, 7], left_last_block(whole, [*text, 5, 6, 7])[-1:])  # two before it are not known
    assert read(late, [*text, 5, 6, 7, 8]).isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_servers_words_make_no_unsamplable_guess(value: float, folder: Path) -> None:
    reader = reader_of(folder)
    reader.note([5, 6, 7], torch.full((3, HIDDEN), value))
    for line in ([5, 6, 7, 8], [5, 6, 7, 8, 9]):
        assert read(reader, line).isfinite().all()


def without(file: Path, name: str) -> None:
    tensors = load_file(file)
    save_file({key: value for key, value in tensors.items() if not key.endswith(name)}, file, {"format": "pt"})


def narrower(file: Path, name: str) -> None:
    tensors = {
        key: value[..., :-1].contiguous() if key.endswith(name) else value for key, value in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("damage", [without, narrower])
@pytest.mark.parametrize(
    "name", ["enorm.weight|pre_fc_norm_embedding.weight", "6.self_attn.o_proj.weight|0.self_attn.o_proj.weight"]
)
def test_head_that_does_not_fit_is_left_out(
    architecture: str, damage: Callable[[Path, str], None], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_with_head(architecture, tmp_path)
    damage(folder / "model.safetensors", name.split("|")[architecture == "qwen3_next"])
    part = load_client(folder)
    with caplog.at_level(logging.WARNING):
        assert mtp_head(part) is None and mtp_head(part) is None
    (said,) = [record.getMessage() for record in caplog.records if "MTP head" in record.getMessage()]
    assert "\n" not in said
    assert part.head(torch.zeros(1, 1, HIDDEN)).isfinite().all()


def test_models_without_a_head_say_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert mtp_head(load_client(save_tiny("llama", tmp_path))) is None and not caplog.records
