"""The model of a GGUF file in several parts."""

from __future__ import annotations

from pathlib import Path

import gguf


def split(file: Path, folder: Path, *, names: str = "model-{:05}-of-00003.gguf", count: int = 3) -> list[Path]:
    """The model of a file in three parts, as llama.cpp's gguf-split makes them."""
    reader = gguf.GGUFReader(file)
    parts = []
    for number in range(count):
        parts.append(folder / names.format(number + 1))
        writer = gguf.GGUFWriter(parts[-1], "llama")
        for name, held in reader.fields.items() if number == 0 else ():
            if name.startswith("GGUF.") or name == "general.architecture":
                continue
            kind = held.types[0]
            writer.add_key_value(
                name, held.contents(), kind, held.types[1] if kind == gguf.GGUFValueType.ARRAY else None
            )
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts
