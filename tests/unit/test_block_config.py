"""Which device and dtype a person's word means, and what is no configuration of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.configuration_utils import PreTrainedConfig

from petalnode.node.blocks.config import choose_device, choose_dtype, read_config
from petalnode.node.errors import BadInput, MachineError, ModelError

NEITHER = "is no device"
MISSING = "this machine has no device"


@pytest.mark.parametrize(
    ("cuda", "mps", "asked", "chosen"),
    [
        *((0, False, "auto", "cpu"), (2, True, "auto", "cuda"), (0, True, "auto", "mps"), (2, True, "cpu", "cpu")),
        *((2, False, "cuda", "cuda"), (2, False, "cuda:1", "cuda:1"), (0, True, "mps", "mps")),
        *((2, False, "cuda:2", MISSING), (0, True, "cuda", MISSING), (2, False, "mps", MISSING)),
        *((2, True, "abacus", NEITHER), (2, True, "meta", NEITHER), (2, True, "", NEITHER)),
    ],
)
def test_a_device_is_one_that_this_machine_has(
    cuda: int, mps: bool, asked: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    if chosen in (NEITHER, MISSING):
        with pytest.raises(BadInput if chosen == NEITHER else MachineError, match=chosen):
            choose_device(asked)
    else:
        assert choose_device(asked) == torch.device(chosen)


@pytest.mark.parametrize(
    ("asked", "said", "chosen"),
    [
        *(("auto", torch.bfloat16, torch.bfloat16), ("auto", None, torch.float32), ("auto", torch.int8, torch.float32)),
        *(("auto", "float16", torch.float16), ("auto", "torch.bfloat16", torch.bfloat16), ("auto", "x", torch.float32)),
        *(("float32", torch.float16, torch.float32), ("float16", None, torch.float16)),
    ],
)
def test_dtype_is_as_asked_or_as_saved(asked: str, said: Any, chosen: torch.dtype) -> None:
    config: Any = PreTrainedConfig()
    object.__setattr__(config, "dtype", said)
    assert choose_dtype(asked, config) == chosen
    with pytest.raises(BadInput, match="'int3' is no dtype to compute in"):
        choose_dtype("int3", config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"hidden_size": 8}, "names no model_type"),
        ({"model_type": 3}, "names no model_type"),
        ({"model_type": "nobody's"}, "cannot be used"),
        ({"model_type": "llama", "hidden_size": "wide"}, "cannot be used"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}, "cannot be used"),
    ],
)
def test_what_is_no_configuration_is_said(config: dict[str, object], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('the code of a folder ran')")
    with pytest.raises(ModelError, match=says):
        read_config(tmp_path)


def test_the_language_part_says_what_the_whole_says(tmp_path: Path) -> None:
    text = {"model_type": "llama", "num_hidden_layers": 3}
    whole = {"model_type": "llava", "text_config": text, "tie_word_embeddings": True, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found: Any = read_config(tmp_path)
    assert (found.num_hidden_layers, found.tie_word_embeddings, found.dtype) == (3, True, torch.float16)
    (tmp_path / "config.json").write_text(json.dumps({**text, "tie_word_embeddings": False}))
    assert read_config(tmp_path).tie_word_embeddings is False
