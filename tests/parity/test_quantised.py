"""Spans of quantised blocks compute what the same blocks compute with the weights that they stand for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from petalnode.node.blocks.quantisation.matrix import QuantisedLinear
from petalnode.node.blocks.quantisation.slots import QuantisedExperts
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.errors import MachineError, ModelError
from petalnode.protocols.ids import Span
from tests.import_graph import ROOT
from tests.parity.quantised import save_dequantised
from tests.swarm import warm_python
from tests.swarm.processes import run_to_end
from tests.tiny_models import save_tiny

Tiny = Callable[[str], Path]

SPAN = Span(1, 4)
# Biases (qwen2), another layout of the weights (gpt2), layers of its own (falcon), experts (mixtral), experts with
# biases, their weights transposed and interleaved (gpt_oss), shared experts and low-rank attention (deepseek_v3).
EXPERTS = ("mixtral", "gpt_oss", "deepseek_v3")
ARCHITECTURES = ("llama", "qwen2", "gpt2", "falcon", *EXPERTS)
# Of the whole span, relative rms. int8 rounds inputs to sixteen bits, nf4 to bfloat16 where the processor has it.
EXACT = {"int8": 2e-3, "nf4": 3e-2}
# What is left of the unquantised answer in tiny models, whose random weights make the most of every error.
CLOSE = {"int8": 0.06, "nf4": 0.6}
KINDS = ("int8", "nf4")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("cache")
        patch.setenv("PETALNODE_CACHE", str(root))
        yield root


@pytest.fixture(scope="module")
def dequantised(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    made: dict[tuple[str, str], Path] = {}

    def folder(architecture: str, quantisation: str) -> Path:
        key = (architecture, quantisation)
        if key not in made:
            made[key] = save_dequantised(tiny(architecture), tmp_path_factory.mktemp("dequantised"), quantisation)
        return made[key]

    return folder


def hidden(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, tokens, 64, generator=torch.Generator().manual_seed(seed))


def run(span: BlockSpan, states: torch.Tensor) -> torch.Tensor:
    return span.forward(states, span.make_cache(states.shape[0], states.shape[1]))


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def typical(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The median over the tokens: one that stands between two experts may go to another, for the smallest reason."""
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@pytest.mark.parametrize("quantisation", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_computes_with_the_weights_it_stands_for(
    architecture: str, quantisation: str, tiny: Tiny, dequantised: Callable[[str, str], Path]
) -> None:
    span = load_span(tiny(architecture), SPAN, quantisation=quantisation)
    whole, exact = load_span(tiny(architecture), SPAN), load_span(dequantised(architecture, quantisation), SPAN)
    assert span.quantisation == quantisation
    assert span.supports_ragged == whole.supports_ragged
    states = hidden(12, rows=2)
    output = run(span, states)
    error = typical if architecture in EXPERTS else relative
    assert error(output, run(exact, states)) < EXACT[quantisation]
    assert error(output - states, run(whole, states) - states) < CLOSE[quantisation]


@pytest.mark.parametrize("quantisation", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_tokens_together_singly_and_batched_are_equal(architecture: str, quantisation: str, tiny: Tiny) -> None:
    span = load_span(tiny(architecture), SPAN, quantisation=quantisation)
    states, other = hidden(9), hidden(5, seed=1)
    together = run(span, states)
    one, neighbour = span.make_cache(1, 9), span.make_cache(1, 14)
    span.forward(other, neighbour)
    outputs = [span.decode([(states[:, at : at + 1], one), (other[:, -1:], neighbour)])[0] for at in range(9)]
    assert typical(torch.cat(outputs, 1), together) < EXACT[quantisation]


@pytest.mark.parametrize("quantisation", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "falcon", "mixtral"])
def test_gradients_are_those_of_weights_it_stands_for(
    architecture: str, quantisation: str, tiny: Tiny, dequantised: Callable[[str, str], Path]
) -> None:
    """Also after steps without gradients, which is when bitsandbytes' own nf4 layers begin to give wrong ones."""
    span = load_span(tiny(architecture), SPAN, quantisation=quantisation)
    exact = load_span(dequantised(architecture, quantisation), SPAN)
    run(span, hidden(3))
    states, flowing = hidden(10), hidden(10, seed=2)

    def gradient(of: BlockSpan) -> torch.Tensor:
        entered = states.clone().requires_grad_()
        left = of.stack.run(entered, None, torch.arange(10).unsqueeze(0))
        (found,) = torch.autograd.grad(left, entered, flowing)
        return found

    error = typical if architecture in EXPERTS else relative
    assert error(gradient(span), gradient(exact)) < 3 * EXACT[quantisation]


def test_what_is_quantised_and_what_stays(tiny: Tiny) -> None:
    span = load_span(tiny("mixtral"), SPAN, quantisation="nf4")
    block = span.stack.blocks[0]
    quantised = {name for name, module in block.named_modules() if isinstance(module, QuantisedLinear)}
    assert quantised == {f"self_attn.{letter}_proj" for letter in "qkvo"}
    assert [name for name, module in block.named_modules() if isinstance(module, QuantisedExperts)] == ["mlp.experts"]
    left = {name: parameter.dtype for name, parameter in block.named_parameters()}
    assert left.keys() == {"input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate.weight"}
    assert set(left.values()) == {torch.float32}


def test_experts_in_form_of_their_own_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ModelError, match=r"int8 reaches only \d+ % of the weights.*llama4_text.*--quant none"):
        load_span(tiny("llama4"), SPAN, quantisation="int8")


def test_other_devices_are_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(MachineError, match="--quant nf4 needs a CPU or a CUDA device"):
        load_span(tiny("llama"), SPAN, device="mps", quantisation="nf4")


def test_weights_that_quantisation_does_not_hold_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][5, 6] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"does not hold the weights of block 2 \(mlp.up_proj.weight: .*nan"):
        load_span(folder, SPAN, quantisation="nf4")


class Seen:
    """Counts how much was quantised."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if what.startswith("Quantising"):
            self.nbytes = done


@pytest.mark.parametrize("quantisation", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_next_start_finds_same_blocks_on_disk(quantisation: str, dtype: str, tmp_path: Path) -> None:
    folder = save_tiny("qwen2", tmp_path / "model", seed=7)
    states = hidden(8)
    first, second, third = Seen(), Seen(), Seen()
    made = run(load_span(folder, SPAN, dtype=dtype, quantisation=quantisation, progress=first), states)
    found = run(load_span(folder, SPAN, dtype=dtype, quantisation=quantisation, progress=second), states)
    assert first.nbytes > 0
    assert second.nbytes == 0
    assert torch.equal(made, found)
    # A span that overlaps makes only the blocks that are not there.
    load_span(folder, Span(2, 5), dtype=dtype, quantisation=quantisation, progress=third)
    assert third.nbytes == first.nbytes // 3


def test_a_damaged_block_is_made_again(tmp_path: Path, cache: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model", seed=8)
    before = set((cache / "quantised").iterdir()) if (cache / "quantised").exists() else set()
    states = hidden(8)
    expected = run(load_span(folder, SPAN, quantisation="nf4"), states)
    file = sorted(set((cache / "quantised").iterdir()) - before)[0]
    data = bytearray(file.read_bytes())
    data[-100] ^= 0x10
    file.write_bytes(data)
    again, then = Seen(), Seen()
    assert torch.equal(run(load_span(folder, SPAN, quantisation="nf4", progress=again), states), expected)
    assert again.nbytes > 0
    assert torch.equal(run(load_span(folder, SPAN, quantisation="nf4", progress=then), states), expected)
    assert then.nbytes == 0


def test_a_disk_that_keeps_nothing_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, states = save_tiny("llama", tmp_path / "model"), hidden(8)
    expected = run(load_span(folder, SPAN, quantisation="int8"), states)
    (tmp_path / "quantised").write_text("a file where the folder should be")
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path))
    assert torch.equal(run(load_span(folder, SPAN, quantisation="int8"), states), expected)


_PEAK = """
import sys
from pathlib import Path
import torch
from petalnode.node.blocks.quantisation import quantiser as quantised_blocks
from petalnode.node.blocks.span import load_span
from petalnode.node.blocks.quantisation.matrix import bitsandbytes
from petalnode.protocols.ids import Span

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

torch.set_num_threads(1)
folder, small = Path(sys.argv[1]), Path(sys.argv[2])
load_span(small, Span(0, 2), dtype="float32", quantisation="nf4")  # all that is imported and allocated once
Path("/proc/self/clear_refs").write_text("5")
before = peak()
span = load_span(folder, Span(0, 6), dtype="float32", quantisation="nf4")
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not tell the peak of memory")
def test_no_more_than_a_block_is_held_unquantised(tiny: Tiny, tmp_path: Path) -> None:
    """Six blocks of 12 MiB each in float32, and half of that mapped from the disk; 10 MiB once they are nf4."""
    wide = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8}
    folder = save_tiny("llama", tmp_path / "wide", dtype=torch.bfloat16, **wide)
    program = [sys.executable, "-c", _PEAK, str(folder), str(tiny("llama"))]
    done = run_to_end(program, warm_python.python_environment(), ROOT)
    assert float(done.out) < 80, f"all blocks in float32 and as they are mapped would be 110: {done}"
