"""What `petalnode self-test` computes: products of matrices, and blocks beside the same model in plain transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch.nn.functional import linear
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from ...protocols.ids import Span
from ..models.quantisation import Kernels
from .dot import best_time, dot_rows
from .quantisation.matrix import Int8Matrix, QuantisedMatrix, nf4_kind
from .span import load_span

NUM_BLOCKS: Final = 4
HALVES: Final = (Span(0, NUM_BLOCKS // 2), Span(NUM_BLOCKS // 2, NUM_BLOCKS))
PROMPT: Final = 24
NEW: Final = 16  # tokens of the answer
_VOCABULARY: Final = 512
_SIDE: Final = 1024  # of the matrices that are multiplied
_TALL: Final = 8  # times as many rows, for one row times a matrix: 32 MiB of float32, more than a cache holds
_WRONG: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative rms differences from a product in float64 beyond which a device computes wrong; TF32 is within 2e-2 only."""
_WRONG_QUANTISED: Final = 0.05
"""The same between a kernel for quantised weights and a product with the dequantised ones."""


@dataclass(frozen=True)
class ProductSpeed:
    """Matrix products on one device.

    Attributes:
        flops: floating-point operations per second of a product of two matrices.
        bytes_per_second: of weights, where a matrix is multiplied with one row, as in a decode step.
        error: relative rms difference from the product in float64.
    """

    dtype: str
    flops: float
    bytes_per_second: float
    error: float
    right: bool


def products(device: str, dtype: torch.dtype) -> ProductSpeed:
    """Multiplies random matrices of `dtype` on `device`.

    Raises:
        RuntimeError: the device does not.
    """
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIDE, _SIDE, generator=random).to(dtype) for _ in range(2))
    exact = left.double() @ right.double()
    here, there = left.to(device), right.to(device)
    error = float(((here @ there).cpu().double() - exact).norm() / exact.norm())
    tall = torch.ones(_TALL * _SIDE, _SIDE, dtype=dtype, device=device)
    square = best_time(lambda: (here @ there)[0, 0].item())
    return ProductSpeed(
        dtype=str(dtype).removeprefix("torch."),
        flops=2.0 * _SIDE**3 / square,
        bytes_per_second=tall.nbytes / _seconds_of_row(here[:1], tall),
        error=error,
        right=error <= _WRONG[dtype],
    )


def _seconds_of_row(row: torch.Tensor, tall: torch.Tensor) -> float:
    """The least for a row by a matrix, by whichever way is the quicker one."""
    if tall.device.type == "cpu" and tall.dtype == torch.float32:
        return min(best_time(lambda: linear(row, tall)), best_time(lambda: dot_rows(tall.numpy(), row)))
    return best_time(lambda: linear(row, tall)[0, 0].item())  # waits for the device


def quantised_error(device: str, quantisation: str) -> tuple[float, bool]:
    """The relative rms difference that the kernels for int8 or nf4 weights make, and whether they are right.

    Raises:
        MachineError: this machine has no such kernels.
        RuntimeError: they fail.
    """
    random = torch.Generator().manual_seed(0)
    shape = (_SIDE, _SIDE)
    weight, row = torch.randn(shape, generator=random).to(device), torch.randn(2, _SIDE, generator=random).to(device)
    kind: type[QuantisedMatrix] = Int8Matrix if quantisation == "int8" else nf4_kind(shape, torch.device(device))
    matrix = kind.quantise(weight)
    expected = row @ matrix.rows(0, _SIDE, torch.float32).t()
    error = float((matrix.product(row) - expected).norm() / expected.norm())
    return error, error <= _WRONG_QUANTISED


def make_model(folder: Path, blocks: int = NUM_BLOCKS, width: int = 256) -> None:
    """Saves a Llama with random weights, the same ones each time, without a tokenizer."""
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=blocks,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.1,  # with the usual 0.02 a block hardly changes its input, and no error would show
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)


def question() -> torch.Tensor:
    """int64 [1, PROMPT]."""
    return torch.randint(1, _VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, eq=False)  # tensors are not compared as a whole
class GreedyAnswer:
    """Greedy tokens, and the logits of the last one, float32 [vocabulary]."""

    tokens: tuple[int, ...]
    logits: torch.Tensor

    def difference(self, other: GreedyAnswer) -> float:
        """The largest difference of a logit."""
        return float((self.logits - other.logits).abs().max())


@torch.inference_mode()
def plain_answer(folder: Path, device: str) -> GreedyAnswer:
    """What plain transformers answers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    found = model.generate(
        question().to(device),
        attention_mask=torch.ones(1, PROMPT, dtype=torch.int64, device=device),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return GreedyAnswer(tuple(found.sequences[0, PROMPT:].tolist()), found.logits[-1][0].float().cpu())


@torch.inference_mode()
def span_answer(folder: Path, device: str, kernels: Kernels = "torch") -> GreedyAnswer:
    """What the halves answer, one behind the other, with embeddings and head of plain transformers.

    Raises:
        PetalnodeError: the device or the kernels are not here.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    blocks = [load_span(folder, span, device=device, dtype="float32", kernels=kernels) for span in HALVES]
    caches = [span.make_cache(1, PROMPT + NEW) for span in blocks]
    tokens: list[int] = []
    last, logits = question().to(device), torch.empty(0)
    for _ in range(NEW):
        hidden = model.model.embed_tokens(last)
        for span, cache in zip(blocks, caches, strict=True):
            hidden = span.decode([(hidden, cache)])[0] if tokens else span.forward(hidden, cache)
        logits = model.lm_head(model.model.norm(hidden[:, -1]))[0]
        tokens.append(int(logits.argmax()))
        last = torch.tensor([tokens[-1:]], device=device)
    return GreedyAnswer(tuple(tokens), logits.float().cpu())


def devices() -> list[str]:
    """All that torch can compute on here, the CPU first."""
    found = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return [*found, "mps"] if torch.backends.mps.is_available() else found
