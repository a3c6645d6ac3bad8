"""Tiny checkpoints whose matrices are quantised as programs for it write them, and the values that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, torch.Tensor]
"""What is stored of a matrix, by the ends of the keys, and the float32 values [out, in] that it stands for."""


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, columns] in int32 [rows, columns * bits / 32], the first in the lowest bits."""
    per = 32 // bits
    wide = codes.long().reshape(len(codes), -1, per)
    whole = (wide << (bits * torch.arange(per))).sum(2)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def _groups(weight: torch.Tensor, size: int) -> torch.Tensor:
    return weight.reshape(len(weight), -1, size)


def fp8(weight: torch.Tensor, name: str, block: tuple[int, int]) -> Made:
    rows, width = weight.shape
    high, wide = min(block[0], rows), min(block[1], width)
    scale = torch.rand(-(-rows // high), -(-width // wide)) * 0.01 + 0.001
    scales = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :width]
    held = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": held, name: scale}, held.float() * scales


def whole(weight: torch.Tensor, bits: int, size: int, *, symmetric: bool, dtype: torch.dtype) -> Any:
    """(codes from 0 [out, in], zero points [out, groups], scales [out, groups], values)."""
    parts, top = _groups(weight, size), (1 << bits) - 1
    middle = torch.full(parts.shape[:2], (top + 1) // 2)
    zeros = middle if symmetric else torch.randint(1, top, parts.shape[:2])
    scale = (parts.abs().amax(2) / (top // 2)).to(dtype)
    codes = ((parts / scale.float().unsqueeze(2)).round() + zeros.unsqueeze(2)).clamp(0, top).long()
    values = (codes - zeros.unsqueeze(2)).float() * scale.float().unsqueeze(2)
    return codes.reshape(weight.shape), zeros, scale, values.reshape(weight.shape)


def compressed(
    weight: torch.Tensor, bits: int, size: int, *, symmetric: bool = True, packed: bool = True, order: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Made:  # fmt: skip
    places = torch.randperm(weight.shape[1]) if order else torch.arange(weight.shape[1])
    codes, zeros, scale, values = whole(weight[:, places], bits, size, symmetric=symmetric, dtype=dtype)
    back = places.argsort()
    codes, values = codes[:, back], values[:, back]
    middle = 1 << (bits - 1)
    if not packed:
        return {"weight": (codes - middle).to(torch.int8), "weight_scale": scale}, values
    held = {"weight_packed": _packed(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    if order:
        held["weight_g_idx"] = (torch.arange(weight.shape[1]) // size)[back].to(torch.int32)
    if not symmetric:
        held["weight_zero_point"] = _packed(zeros.t().contiguous(), bits).t().contiguous()
    return held, values


def of_tensor(weight: torch.Tensor, zero: int = 5) -> Made:
    """One scale and one zero point for the whole matrix."""
    scale = (weight.abs().max() / 100).reshape(1)
    codes = ((weight / scale).round() + zero).to(torch.int8)
    beside = {"weight_scale": scale, "weight_zero_point": torch.tensor([zero], dtype=torch.int8)}
    return {"weight": codes, **beside}, (codes.float() - zero) * scale


def gptq(weight: torch.Tensor, bits: int, *, symmetric: bool = True, order: bool = False, lower: int = 1) -> Made:
    size = 32
    places = torch.randperm(weight.shape[1]) if order else torch.arange(weight.shape[1])
    codes, zeros, scale, values = whole(weight[:, places], bits, size, symmetric=symmetric, dtype=torch.float16)
    back = places.argsort()
    return {
        "qweight": _packed(codes[:, back], bits).t().contiguous(),
        "qzeros": _packed((zeros - lower).t().contiguous(), bits),
        "scales": scale.t().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // size)[back].to(torch.int32),
    }, values[:, back]


def awq(weight: torch.Tensor) -> Made:
    codes, zeros, scale, values = whole(weight, 4, 32, symmetric=False, dtype=torch.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def held(matrix: torch.Tensor) -> torch.Tensor:
        return _packed(matrix.reshape(len(matrix), -1, 8)[:, :, order].reshape(len(matrix), -1), 4)

    return {
        "qweight": held(codes.t().contiguous()), "qzeros": held(zeros.t().contiguous()),
        "scales": scale.t().contiguous(),
    }, values  # fmt: skip


def _ct(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def _gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, **more}


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Made]]] = {
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [24, 40], "activation_scheme": "dynamic"},
        lambda weight: fp8(weight, "weight_scale_inv", (24, 40)),
    ),
    "fp8 whole": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda weight: fp8(weight, "weight_scale_inv", (1 << 20, 1 << 20)),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, lambda weight: fp8(weight, "weight_scale", (1, 1 << 20))),
    "float-quantized": (
        _ct("float-quantized", type="float", num_bits=8, strategy="channel"),
        lambda weight: fp8(weight, "weight_scale", (1, 1 << 20)),
    ),
    "int-quantized": (
        _ct("int-quantized", num_bits=8, strategy="channel"),
        lambda weight: compressed(weight, 8, weight.shape[1], packed=False),
    ),
    "int-quantized, zero point": (
        _ct("int-quantized", num_bits=8, strategy="tensor", symmetric=False),
        of_tensor,
    ),
    "packed": (_ct("pack-quantized", num_bits=4, strategy="group", group_size=32), lambda w: compressed(w, 4, 32)),
    "packed, wide scales": (
        _ct("pack-quantized", num_bits=4, strategy="group", group_size=32),
        lambda weight: compressed(weight, 4, 32, dtype=torch.float32),
    ),
    "packed, zero points": (
        _ct("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        lambda weight: compressed(weight, 4, 32, symmetric=False),
    ),
    "packed, by activation": (
        _ct("pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group"),
        lambda weight: compressed(weight, 4, 32, order=True),
    ),
    "packed, eight bits": (
        _ct("pack-quantized", num_bits=8, strategy="channel"),
        lambda weight: compressed(weight, 8, weight.shape[1]),
    ),
    "gptq": (_gptq(), lambda weight: gptq(weight, 4)),
    "gptq, eight bits": (_gptq(bits=8), lambda weight: gptq(weight, 8)),
    "gptq, zero points": (_gptq(sym=False), lambda weight: gptq(weight, 4, symmetric=False)),
    "gptq, by activation": (_gptq(desc_act=True), lambda weight: gptq(weight, 4, order=True)),
    "gptq_v2": (_gptq(checkpoint_format="gptq_v2"), lambda weight: gptq(weight, 4, lower=0)),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        awq,
    ),
}
IN_FEW_BITS = ("int-quantized", "packed", "packed, eight bits", "gptq", "gptq, eight bits", "gptq_v2")
"""Of which the kernels have a form for every value."""


def save_quantised(plain: Path, under: Path, layout: str) -> tuple[Path, Path]:
    """Two folders: the model of `plain` with the matrices of its blocks quantised, and with the values of these."""
    stated, quantise = LAYOUTS[layout]
    torch.manual_seed(7)
    held: Tensors = {}
    values: Tensors = {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        if "proj" in key and key.endswith(".weight"):
            made, values[key] = quantise(tensor.float())
            held |= {key.removesuffix("weight") + end: part for end, part in made.items()}
        else:
            held[key] = values[key] = tensor
    config = json.loads((plain / "config.json").read_text())
    folders = under / "quantised", under / "opened"
    for folder, tensors, said in zip(folders, (held, values), ({"quantization_config": stated}, {}), strict=True):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config | said))
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return folders
