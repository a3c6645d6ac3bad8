"""Models that cannot be served are refused in words by everybody, before there is any weight to load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from petalnode.node.blocks.architecture import (
    block_sizes,
    cache_specs,
    check_download,
    linear_layers,
    open_skeleton,
    windows_of,
)
from petalnode.node.blocks.cache import BlockCacheSpec
from petalnode.node.blocks.caches.pages import lets_go
from petalnode.node.blocks.client_part import load_client
from petalnode.node.blocks.config import original_length
from petalnode.node.blocks.span import load_span
from petalnode.node.errors import MachineError, ModelError, PetalnodeError
from petalnode.node.models import resolve
from petalnode.node.server.lifecycle.devices import plan_memory
from petalnode.node.server.lifecycle.options import ServerOptions
from petalnode.protocols.ids import Span
from tests.tiny_models import save_tiny

STATE = "keeps more than attention keys and values"
OWN = "has no cache of attention keys and values as other decoders have"
REFUSED = {
    "zaya": STATE,
    **dict.fromkeys(("rwkv", "xlstm", "xlnet", "openai-gpt"), OWN),
    **dict.fromkeys(("cpmant", "longcat_flash"), "cannot tell which layers"),
    **dict.fromkeys(("bart", "bert"), "decoder-only"),
}
QUANTISED: dict[str, dict[str, Any]] = {
    "MLX": {"quantization": {"group_size": 64, "bits": 4}},
    "compressed-tensors": {"compression_config": {"format": "int-quantized", "global_compression_ratio": 1.5}},
    "bitsandbytes": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "fp8 with experts of fp4": {"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}},
    "awq": {"text_config": {"quantization_config": {"quant_method": "awq"}}},
}

EVERYBODY: dict[str, Callable[[Path], Any]] = {
    "server": lambda folder: load_span(folder, Span(0, 1)),
    "server before it reads": lambda folder: plan_memory(resolve(folder, need="config"), ServerOptions(str(folder))),
    "client": load_client,
    "adapters": linear_layers,
    "download": lambda folder: check_download({folder / "model.safetensors": 1}, ()),
    "sizes": lambda folder: block_sizes(folder, "auto", "none"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_everybody_refuses_in_same_words_without_any_weights(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    AutoConfig.for_model(kind).save_pretrained(folder)
    for who in ("server", "server before it reads", "client"):
        with pytest.raises(ModelError) as caught:
            EVERYBODY[who](folder)
        assert REFUSED[kind] in str(caught.value), who


@pytest.mark.parametrize("window", [256, 128])
def test_window_that_only_cache_has_is_refused(window: int, tmp_path: Path) -> None:
    """In transformers, moshi sees all of a prompt that comes at once, and a window of one that comes in pieces."""
    config = AutoConfig.for_model("moshi", max_position_embeddings=256, sliding_window=window, num_hidden_layers=2)
    config.save_pretrained(tmp_path / "model")
    for who in ("server before it reads", "sizes", "adapters", "download"):
        if window == 256:
            EVERYBODY[who](tmp_path / "model")
            continue
        with pytest.raises(ModelError, match=r"window of 128 tokens .* in one piece than in several"):
            EVERYBODY[who](tmp_path / "model")


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_weights_are_refused_by_their_configuration(method: str, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | QUANTISED[method]))
    for use in (*EVERYBODY.values(), resolve):
        with pytest.raises(ModelError, match=f"quantised by {method}"):
            use(folder)


def test_configuration_that_does_not_compute_is_refused(tmp_path: Path) -> None:
    """Falcon without multi-query attention and with fewer key-value heads: its own matrices do not fit together."""
    folder = save_tiny(
        "falcon", tmp_path / "model", alibi=True, new_decoder_architecture=False, multi_query=False, num_kv_heads=2
    )
    with pytest.raises(ModelError, match="do not run apart"):
        load_span(folder, Span(0, 1))


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("parameters", "length"),
    [
        (None, None),
        ({"rope_type": "default", "original_max_position_embeddings": 64}, None),
        (LONGROPE, 64),
        ({"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}, 64),
        ({"full_attention": LONGROPE, "sliding_attention": LONGROPE}, 64),
    ],
)
def test_all_layers_take_long_factors_from_one_length(parameters: Any, length: int | None) -> None:
    config = PreTrainedConfig()
    config.rope_parameters = parameters
    assert original_length(config) == length
    config.rope_parameters = {"other": {**LONGROPE, "original_max_position_embeddings": 32}, "full": LONGROPE}
    with pytest.raises(ModelError, match="from different lengths on"):
        original_length(config)


def test_what_a_block_keeps_is_found_by_running(tmp_path: Path) -> None:
    skeleton = open_skeleton(save_tiny("gemma3", tmp_path / "model"))
    windows = windows_of(skeleton)
    assert windows == [8, None] * 3
    found: Any = load_span(tmp_path / "model", Span(1, 4))
    forgets = lets_go(torch.device("cpu"))
    windowed = BlockCacheSpec(2, 16, 16, 8, forgets=forgets)
    everything = BlockCacheSpec(2, 16, 16, None)
    assert found.make_cache(1, 10).specs == (everything, windowed, everything)


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (MemoryError(), MachineError, "takes more memory than can be had"),
        (ValueError(" \nno such\nthing"), ModelError, r"has them \(no such\)"),
        (KeyError(), ModelError, r"\(KeyError\)"),
        (None, ModelError, "use the attention cache of others"),
    ],
)
def test_blocks_that_do_not_run_are_refused(
    error: Exception | None, kind: type[PetalnodeError], says: str, tmp_path: Path
) -> None:
    class Stack:
        def width(self) -> int:
            return 64

        def run(self, *_: Any) -> None:
            if error is not None:
                raise error

    skeleton = open_skeleton(save_tiny("llama", tmp_path / "model"))
    with pytest.raises(kind, match=says):
        cache_specs(Stack(), skeleton, [None], torch.device("cpu"))  # type: ignore[arg-type]
