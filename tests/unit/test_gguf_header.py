"""The header of a GGUF file is a stranger's: lengths beyond the bounds are refused before memory is spent on them."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest

from petalnode.node.errors import ModelError
from petalnode.node.models.sources import gguf_header
from petalnode.node.models.sources.gguf_header import read_gguf_header

UINT8, UINT32, TEXT, ARRAY = 0, 4, 8, 9


def written(file: Path, *metadata: bytes, tensors: int = 0, keys: int | None = None, size: int = 0) -> Path:
    """A file of this metadata, with as many bytes of nothing behind it as make `size` in all."""
    counts = struct.pack("<4sIQQ", b"GGUF", 3, tensors, len(metadata) if keys is None else keys)
    file.write_bytes(counts + b"".join(metadata))
    with file.open("ab") as stream:
        stream.truncate(max(size, stream.tell() + 32))  # what is before the tensors
    return file


def key(number: int, kind: int, value: bytes) -> bytes:
    name = f"key.{number}".encode()
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def array(element: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", element, count) + values


def refusal(file: Path) -> str:
    with pytest.raises(ModelError) as refused:
        read_gguf_header(file)
    return str(refused.value)


def test_counts_beyond_the_bounds_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    assert "200,001 tensors; at most 200,000 are read" in refusal(written(file, tensors=200_001))
    assert "4,097 keys; at most 4,096 are read" in refusal(written(file, keys=4097))
    assert str(2**64 - 1)[:2] in refusal(written(file, tensors=2**64 - 1)).replace(",", "")
    for element in (UINT8, TEXT, ARRAY):
        word = refusal(written(file, key(0, ARRAY, array(element, 4_000_001)), size=8_000_000))
        assert "4,000,001 entries of arrays; at most 4,000,000 are read" in word


def test_entries_count_over_all_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "_MAX_ENTRIES", 6)
    three = key(0, ARRAY, array(UINT8, 3, b"abc"))
    four = key(1, ARRAY, array(UINT8, 4, b"abcd"))
    nested = key(2, ARRAY, array(ARRAY, 2, array(UINT8, 2, b"ab") * 2))
    assert read_gguf_header(written(tmp_path / "one.gguf", nested)).metadata == {"key.2": 2}
    assert read_gguf_header(written(tmp_path / "two.gguf", three, three)).metadata == {"key.0": 3}
    assert "7 entries" in refusal(written(tmp_path / "three.gguf", three, four))
    assert "9 entries" in refusal(written(tmp_path / "four.gguf", key(1, UINT32, b"abcd"), nested, three))


@pytest.mark.parametrize("kind", ["text", "text in an array", "name"])
def test_a_text_as_long_as_the_file_is_not_read(tmp_path: Path, kind: str) -> None:
    """Before, 1 GiB of zeros in a file that takes no room on the disk became as much text in memory."""
    length = struct.pack("<Q", 1 << 30)
    value = {"text": key(0, TEXT, length), "text in an array": key(0, ARRAY, array(TEXT, 1, length)), "name": length}
    file = written(tmp_path / "model.gguf", value[kind], size=(1 << 30) + 1000)
    tracemalloc.start()
    try:
        assert "bytes of header; at most 67,108,864 are read" in refusal(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_arrays_in_arrays_without_end_are_refused(tmp_path: Path) -> None:
    assert "damaged" in refusal(written(tmp_path / "model.gguf", key(0, ARRAY, array(ARRAY, 1) * 100_000)))
