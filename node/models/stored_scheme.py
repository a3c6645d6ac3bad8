"""How the matrices of a safetensors checkpoint are quantised, as its configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import ModelError

_FORMATS: Final = frozenset(("float-quantized", "naive-quantized", "int-quantized", "pack-quantized"))
"""Of compressed-tensors; `dense` has no quantised matrices."""
_INTEGERS: Final = (4, 8)  # bits
SCALE_RUN: Final = 32
"""Inputs that share a scale in GGUF's Q4_0 and Q8_0."""


@dataclass(frozen=True)
class StoredScheme:
    """
    Attributes:
        method: as the configuration names it.
        bits: of a value.
        integers: whether values are whole numbers; else they are floats of eight bits.
        symmetric: whether these have no zero points but the middle.
        block: (rows, columns) that share a scale, if scales are those of blocks; else their shape says it.
        group: inputs that share a scale, where the configuration says it; 0 otherwise.
        zero_offset: what is added to a stored zero point.
        in_order: whether inputs that share a scale stand side by side.
    """

    method: str
    bits: int = 8
    integers: bool = False
    symmetric: bool = True
    block: tuple[int, int] | None = None
    group: int = 0
    zero_offset: int = 0
    in_order: bool = True

    @property
    def kind(self) -> str | None:
        """The kind of GGUF that has the same values, as far as their scales are numbers of 16 bits; None for none."""
        runs = self.in_order and self.group % SCALE_RUN == 0
        return f"Q{self.bits}_0" if self.integers and self.symmetric and runs else None


def stored_scheme(stated: Mapping[str, Any]) -> StoredScheme:
    """What a configuration's `quantization_config` means.

    Raises:
        ModelError: it is nothing that is loaded here; says what.
    """
    method = stated.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        if stated.get("expert_dtype") not in (None, "fp8"):
            raise ModelError(f"weights quantised by {method} with experts of {stated['expert_dtype']}")
        return StoredScheme(str(method), block=_block(stated.get("weight_block_size")))
    if method == "gptq":
        return _gptq(stated)
    if method == "awq":
        return _awq(stated)
    if method == "compressed-tensors":
        return _compressed(stated)
    raise ModelError(f"weights quantised by {method}")


def _block(stated: Any) -> tuple[int, int] | None:
    if stated is None:
        return None
    if isinstance(stated, list) and len(stated) == 2 and all(isinstance(size, int) and size > 0 for size in stated):
        return (stated[0], stated[1])
    raise ModelError("blocks of scales that are none")


def _gptq(stated: Mapping[str, Any]) -> StoredScheme:
    form = stated.get("checkpoint_format") or "gptq"
    if stated.get("bits") not in _INTEGERS or form not in ("gptq", "gptq_v2"):
        raise ModelError(f"weights quantised by gptq with {stated.get('bits')} bits in the format {form}")
    symmetric, offset = bool(stated.get("sym", True)), 1 if form == "gptq" else 0
    in_order = not stated.get("desc_act")
    return StoredScheme("gptq", int(stated["bits"]), True, symmetric, None, _group(stated), offset, in_order)


def _awq(stated: Mapping[str, Any]) -> StoredScheme:
    version = str(stated.get("version", "gemm")).lower()
    if stated.get("bits", stated.get("w_bit")) != 4 or version != "gemm":
        raise ModelError(f"weights quantised by awq in the version {version}")
    return StoredScheme("awq", 4, True, symmetric=False, group=_group(stated))


def _group(stated: Mapping[str, Any]) -> int:
    size = stated.get("group_size", stated.get("q_group_size", -1))
    return size if isinstance(size, int) and size > 0 else 0


def _compressed(stated: Mapping[str, Any]) -> StoredScheme:
    groups = stated.get("config_groups")
    sparsity = stated.get("sparsity_config")
    sparse = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense"
    if not isinstance(groups, Mapping) or not groups or sparse or stated.get("transform_config"):
        raise ModelError("weights compressed by compressed-tensors in a way of its own (sparse, or transformed)")
    found = {_group_of(group, stated.get("format")) for group in groups.values()}
    if len(found) != 1:
        raise ModelError("weights quantised by compressed-tensors in several ways")
    return found.pop()


def _group_of(group: Any, usual: Any) -> StoredScheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    form = (group.get("format") or usual) if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or not isinstance(form, str) or form not in _FORMATS:
        raise ModelError(f"weights quantised by compressed-tensors in the format {form}")
    bits: Any = weights.get("num_bits")
    kind = weights.get("type", "int")
    if (kind, bits) not in (("float", 8), *(("int", some) for some in _INTEGERS)):
        raise ModelError(f"weights quantised by compressed-tensors to {bits} bits ({kind})")
    symmetric = weights.get("symmetric") is not False
    block = _block(weights.get("block_structure"))
    group_size = _group(weights) if weights.get("strategy") == "group" else 0
    in_order = weights.get("actorder") in (None, False, "weight", "static")
    return StoredScheme("compressed-tensors", int(bits), kind == "int", symmetric, block, group_size, in_order=in_order)
