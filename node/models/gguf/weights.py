"""The weights of GGUF files as parameters of a transformers model: which rows of which tensors each is made of.

Names and layouts are those of `placement`, or transformers' own reading of GGUF. Where rows are only reordered, or
those of several tensors joined, a parameter can be had in the bytes of the file; else its values are opened and
converted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from ...errors import ModelError
from .architectures import ARCHITECTURES, named
from .config import LONGROPE_FACTORS, ROPE_FACTORS
from .header import GgufTensor, read_gguf_header
from .placement import Placement, is_of_blocks
from .stored import PIECE_BYTES, open_rows, row_count, stored_rows, stored_values

if TYPE_CHECKING:
    import numpy as np
    import torch

_INSTEAD: Final = "Use the model's safetensors folder."
_SIXTEEN_BITS: Final = ("F16", "BF16")


@dataclass(frozen=True)
class GgufWeights:
    """
    Args:
        files: of the model, in order.
        config: `config.json`.
        parameters: shapes of the whole model's parameters, by name.
        tied: names of those that are others of them.
    """

    files: tuple[Path, ...]
    config: Mapping[str, Any] = field(repr=False)
    parameters: Mapping[str, tuple[int, ...]] = field(repr=False)
    tied: Collection[str] = field(repr=False)

    @cached_property
    def sources(self) -> Mapping[str, tuple[tuple[Path, GgufTensor], ...]]:
        """By parameter, the tensors that it is made of.

        Raises:
            ModelError: a tensor has no place in the model, a parameter has no tensor, or shapes differ.
        """
        found: dict[str, list[tuple[Path, GgufTensor]]] = {}
        for file, tensor in self._tensors():
            name = self._names.get(tensor.name) or self._names.get(tensor.name.removesuffix(".weight"))
            if name is None:
                raise ModelError(
                    f"{file} holds {tensor.name!r}, for which transformers has no place: without it the "
                    f"model would compute something else. {_INSTEAD}"
                )
            found.setdefault(name, []).append((file, tensor))
        missing = sorted(self.parameters.keys() - found.keys() - set(self.tied))
        if missing:
            shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            raise ModelError(f"{self.files[0]} lacks weights of its architecture: {shown}. It cannot be used.")
        return {name: tuple(sorted(of, key=lambda source: source[1].name)) for name, of in found.items()}

    def check_shapes(self) -> None:
        """
        Raises:
            ModelError: as `sources`; a tensor has another shape than its place in the model.
        """
        for name, of in sorted(self.sources.items()):
            wanted, file = self.parameters.get(name), of[0][0]
            held = sum(row_count(tensor) * tensor.shape[-1] for _, tensor in of)
            shape = [*of[0][1].shape]
            if wanted is not None and (held != _count(wanted) or (len(of) == 1 and sorted(shape) != sorted(wanted))):
                if len(shape) < len(wanted) and held == _count(wanted):
                    continue  # with a dimension of one
                raise ModelError(
                    f"{file} holds {name!r} as {shape}, where transformers reads {list(wanted)} out of its "
                    f"configuration. {_INSTEAD}"
                )

    def kind(self, name: str) -> str | None:
        """The kind that parameter `name` has in the file, if it is made of whole rows of one."""
        of = self.sources.get(name, ())
        order = self._order(name) if len({tensor.kind for _, tensor in of}) == 1 else None
        if order is None or len({tensor.shape[-1] for _, tensor in of}) != 1:
            return None
        shape = (*order.shape, of[0][1].shape[-1])
        return of[0][1].kind if shape == self._held_as(name, shape) else None

    def pieces(self, name: str, expert: int | None, unit: int) -> Iterator[np.ndarray]:
        """The bytes of the parameter's rows, or of one matrix of a stack, some at a time: uint8 [rows, bytes of a row],
        contiguous; whole units of rows, but for the last ones. Only of a parameter that has a `kind`.

        Raises:
            ModelError: the file cannot be read, or has become shorter.
        """
        order, tensor = self._order(name), self.sources[name][0][1]
        assert order is not None
        rows = (order if expert is None else order[expert]).reshape(-1)
        step = max(1, PIECE_BYTES * row_count(tensor) // tensor.nbytes // unit) * unit
        return (self._read(name, rows[first : first + step]) for first in range(0, len(rows), step))

    def _read(self, name: str, order: np.ndarray) -> np.ndarray:
        import numpy as np

        rows, parts, base = order.reshape(-1), [], 0
        for file, tensor in self.sources[name]:
            own = (rows >= base) & (rows < base + row_count(tensor))
            if own.any():
                wanted = rows[own] - base
                first, last = int(wanted.min()), int(wanted.max()) + 1
                held = stored_rows(file, tensor, first, last)
                if not (len(wanted) == last - first and bool((np.diff(wanted) == 1).all())):
                    held = held[wanted - first]
                parts.append((own, held))
            base += row_count(tensor)
        if len(parts) == 1:
            return parts[0][1]
        found = np.empty((len(rows), parts[0][1].shape[1]), np.uint8)
        for own, held in parts:
            found[own] = held
        return found

    def of_heads(self, name: str) -> tuple[tuple[str, tuple[int, int]], ...]:
        """Kinds and shapes [rows, values of a row] of all heads' keys' and values' tensors, if `name` is made of these;
        none otherwise."""
        of = self.sources.get(name, ()) if name.endswith("kv_b_proj.weight") else ()
        found = tuple((tensor.kind, (row_count(tensor), tensor.shape[-1])) for _, tensor in of)
        return found if len(found) == 2 else ()

    def stored_heads(self, name: str, place: int) -> np.ndarray:
        """The bytes of the tensor at this place of `of_heads`. Raises as `pieces`."""
        file, tensor = self.sources[name][place]
        return stored_rows(file, tensor, 0, row_count(tensor))

    def values(self, name: str) -> torch.Tensor:
        """The parameter: in the type of the file where that has 16 bits a value, else the exact float32 values.

        Raises:
            ModelError: as `pieces`; the file's kind cannot be opened.
        """
        import numpy as np
        import torch

        order, kind = self._order(name), self.kind(name)
        if order is None:
            arrays = {tensor.name: stored_values(file, tensor) for file, tensor in self.sources[name]}
            return self._placed(arrays, name)
        if kind in _SIXTEEN_BITS:
            dtype = torch.float16 if kind == "F16" else torch.bfloat16
            return self.turned(torch.from_numpy(self._read(name, order)).view(dtype).reshape(self.shape(name)), name)
        sources = self.sources[name]
        found = np.empty((order.size, sources[0][1].shape[-1]), np.float32)
        place = 0
        for file, tensor in sources:
            open_rows(file, tensor, found[place : place + row_count(tensor)])
            place += row_count(tensor)
        rows = order.reshape(-1)
        if not bool((np.diff(rows) == 1).all()):
            found = found[rows]
        return self.turned(torch.from_numpy(found).reshape(self.shape(name)), name)

    def dtype(self) -> str:
        """The smallest type that holds every value of the file exactly, if the file itself uses it; else float32.

        Norms are float32 in files of half precision too, most of them with values that came from it.
        """
        import torch

        kinds = {tensor.kind for _, tensor in self._tensors()}
        for half, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
            if half in kinds and kinds <= {half, "F32"}:
                wide = [name for name, of in self.sources.items() if any(tensor.kind == "F32" for _, tensor in of)]
                if all(torch.equal(value, value.to(dtype).float()) for value in map(self.values, wide)):
                    return str(dtype).removeprefix("torch.")
        return "float32"

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the parameter in the model, its matrices turned to [.., out, in]; the file's where it has none there.
        Only of a parameter that has a `kind`."""
        order = self._order(name)
        assert order is not None
        return self._held_as(name, (*order.shape, self.sources[name][0][1].shape[-1]))

    def _held_as(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """The model's shape, its matrices turned to [.., out, in]."""
        shape = self.parameters.get(name) or default
        if self._placement is not None and self._placement.is_transposed(name):
            return (*shape[:-2], shape[-1], shape[-2])
        return shape

    def turned(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """The parameter, of its matrices [.., out, in]; of the parameter, these."""
        turned = self._placement is not None and self._placement.is_transposed(name)
        return values.transpose(-1, -2).contiguous() if turned else values

    def _tensors(self) -> Iterator[tuple[Path, GgufTensor]]:
        """All but the rotary frequencies, which are in the configuration, and heads for drafts."""
        left_out = (ROPE_FACTORS, *(LONGROPE_FACTORS if self.config.get("model_type") == "phi3" else ()))
        for file in self.files:
            for tensor in read_gguf_header(file).tensors:
                ours = self._placement is None or is_of_blocks(tensor.name, self._blocks)
                if ours and tensor.name not in left_out:
                    yield file, tensor

    @cached_property
    def _orders(self) -> dict[str, np.ndarray | None]:
        return {}

    def _order(self, name: str) -> np.ndarray | None:
        """Which rows of its tensors, counted through, make up a parameter, in its shape but the last dimension. None if
        it is made otherwise. Found by letting transformers convert the numbers of the rows in place of their values."""
        if name not in self._orders:
            import numpy as np

            found = self._find_order(name)
            kept = tuple(self._orders.values())  # other threads add to them
            others = {id(order): order for order in kept if order is not None}
            alike = (order for order in others.values() if found is not None and np.array_equal(order, found))
            self._orders[name] = next(alike, found)  # that of another block, where it is the same
        return self._orders[name]

    def _find_order(self, name: str) -> np.ndarray | None:
        import numpy as np

        numbers, count = {}, 0
        for _, tensor in self.sources[name]:
            if len(tensor.shape) < 2:
                return None
            rows = row_count(tensor)
            numbers[tensor.name] = np.arange(count + 1, count + rows + 1).reshape(*tensor.shape[:-1], 1)
            count += rows
        try:
            placed = self._placed(numbers, name).numpy()
        except Exception:  # it looks at the columns, too
            return None
        if placed.shape[-1] != 1 or not np.array_equal(np.sort(placed, axis=None), np.arange(1, count + 1)):
            return None
        order: np.ndarray = placed[..., 0] - 1
        return order

    def _placed(self, arrays: Mapping[str, np.ndarray], name: str) -> torch.Tensor:
        """What is made of the tensors of parameter `name`: by our table, or as transformers does."""
        import numpy as np
        import torch

        if self._placement is not None:
            whole = torch.from_numpy(np.ascontiguousarray(self._placement.placed(arrays, name)))
            shape = self._held_as(name, tuple(whole.shape))
            return self.turned(whole.reshape(shape), name) if whole.numel() == _count(shape) else whole
        placed: dict[str, torch.Tensor] = {}
        for tensor, values in arrays.items():
            result = self._processor.process(
                weights=values, name=tensor, tensor_key_mapping=self._names, parsed_parameters={"tensors": placed}
            )
            if result.name is not None:  # else the processor has put it there itself
                placed[name] = torch.from_numpy(np.ascontiguousarray(result.weights))
        return placed[name]

    @cached_property
    def _placement(self) -> Placement | None:
        """None where transformers reads the file itself."""
        architecture = named(read_gguf_header(self.files[0]))
        return Placement(architecture, self.config, self.parameters) if architecture in ARCHITECTURES else None

    @cached_property
    def _processor(self) -> Any:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        architecture = read_gguf_header(self.files[0]).metadata.get("general.architecture")
        return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=dict(self.config))

    @cached_property
    def _names(self) -> dict[str, str]:
        """From a tensor's name to the parameter's."""
        from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

        if self._placement is not None:
            return self._placement.names(self._blocks)
        try:
            found: dict[str, str] = get_gguf_hf_weights_map(self._outer(), self._processor)
        except NotImplementedError as error:
            raise ModelError(f"{self.files[0]}: the installed `gguf` package does not know it ({error}).") from error
        return found

    def _outer(self) -> Any:
        """What transformers' table asks for of a model, and of the base model in it. A file may have been made of that.
        Deeper modules never add a name, and asking all of them takes seconds."""
        heads = {name.partition(".")[0] for name in self.parameters if "." in name}
        children = []
        for head in sorted(heads):
            inner = {name.removeprefix(f"{head}."): 0 for name in self.parameters if name.startswith(f"{head}.")}
            children.append((head, self._named(inner, [])))
        return self._named(dict.fromkeys(self.parameters, 0), children)

    def _named(self, names: Mapping[str, int], children: list[tuple[str, Any]]) -> Any:
        said = {"model_type": self.config["model_type"], "num_hidden_layers": self._blocks}
        return SimpleNamespace(
            config=SimpleNamespace(**said), state_dict=lambda: names, named_children=lambda: children
        )

    @cached_property
    def _blocks(self) -> int:
        from ..folder import num_blocks

        return num_blocks(self.config)


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
