"""What a stranger writes into an adapter's configuration is read in a time that its length bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from petalnode.node.errors import BadInput
from petalnode.node.models.adapter import _Alphas, read_adapter
from tests.lines_run import LinesRun

PATH = "base_model.model.model.layers.1.self_attn.q_proj"
PATTERNS = [
    *("(([a-z._0-9])*)*!", "(a|a)*(.*.*)*x", "q_(proj|x)", "model\\.layers\\.\\d+\\.q_proj", "q_proj\n"),
    "a" * 9999,
]
KEYS, NAMES = 50_000, 100_000


@pytest.fixture(autouse=True)
def none_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A regular expression of a stranger that is run may take years."""
    compiled: list[Any] = []
    compile_it = re._compile  # type: ignore[attr-defined]

    def note(pattern: Any, flags: int) -> Any:
        compiled.append(pattern)
        return compile_it(pattern, flags)

    monkeypatch.setattr(re, "_compile", note)
    yield
    patterns = [str(getattr(one, "pattern", one)) for one in compiled]
    strange = (*PATTERNS, "q_proj", "layer_0")  # peft puts something around them
    assert not [one for one in patterns if any(part in one for part in strange)]


def adapter(root: Path, options: dict[str, Any], path: str = PATH) -> Path:
    folder = root / "poet"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"} | options
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {"A": torch.ones(2, 8), "B": torch.ones(6, 2)}
    save_file(
        {f"{path}.lora_{part}.weight": tensor for part, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def b_of(folder: Path) -> float:
    return float(read_adapter(folder).tensors["1.self_attn.q_proj.lora_B"].flatten()[0])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("option", ["alpha_pattern"])
def test_a_regular_expression_is_refused(option: str, pattern: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path, {option: {pattern: 8}})
    with pytest.raises(BadInput, match="names of layers"):
        read_adapter(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"rank_pattern": {"(([a-z._0-9])*)*!": 8}},
        {"target_modules": "(([a-z._0-9])*)*!"},
        {"layers_pattern": "(([a-z._0-9])*)*!", "layers_to_transform": [1]},
        {"exclude_modules": "(([a-z._0-9])*)*!"},
    ],
)
def test_other_patterns_are_not_run(options: dict[str, Any], tmp_path: Path) -> None:
    assert b_of(adapter(tmp_path, options)) == 2


def test_many_keys_and_long_name_take_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {f"layer_{number}": 8 for number in range(KEYS)}
    long = "base_model.model." + "a." * NAMES + "layers.1.self_attn.q_proj"
    folder = adapter(tmp_path, {"alpha_pattern": keys | {"q_proj": 16}}, long)
    look_up = _Alphas.scaling

    def counted(*arguments: Any) -> float:
        with LinesRun(1000):  # neither all keys nor all parts of the name
            return look_up(*arguments)

    monkeypatch.setattr(_Alphas, "scaling", counted)
    with LinesRun(20 * (KEYS + NAMES)):
        assert b_of(folder) == 8


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"q_proj": 8}, 4),
        ({"proj": 8}, 2),
        ({"self_attn.q_proj": 8, "q_proj": 16}, 4),
        ({"q_proj": 16, "self_attn.q_proj": 8}, 8),
        ({"self_attn\\.q_proj$": 8}, 4),
        ({"^model.layers.1.self_attn.q_proj": 8}, 4),
        ({"^self_attn.q_proj": 8}, 2),
        ({"layers.11.self_attn.q_proj": 8}, 2),
    ],
)
def test_names_and_ends_of_names_are_taken(patterns: dict[str, float], expected: float, tmp_path: Path) -> None:
    assert b_of(adapter(tmp_path, {"alpha_pattern": patterns})) == expected


@pytest.mark.parametrize("alpha", [10**400, 1e999])
def test_a_number_that_is_too_large_is_said(alpha: float, tmp_path: Path) -> None:
    folder = adapter(tmp_path, {})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"must be numbers|makes no sense|too many digits"):
        read_adapter(folder)
