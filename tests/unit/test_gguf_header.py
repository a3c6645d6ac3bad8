"""The header of a GGUF file is a stranger's: lengths beyond the bounds are refused before memory is spent on them."""

from __future__ import annotations

import re
import struct
import tracemalloc
from pathlib import Path

import pytest

from petalnode.node.errors import ModelError
from petalnode.node.models.checkpoint import Checkpoint, write_gguf_note
from petalnode.node.models.gguf import header as gguf_header
from petalnode.node.models.gguf.header import read_gguf_header

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


def test_counts_beyond_bounds_are_refused_unread(tmp_path: Path) -> None:
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
def test_text_as_long_as_file_is_not_read(tmp_path: Path, kind: str) -> None:
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


def entry(name: bytes, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    """A tensor of the table; `shape` as the file has it, fastest dimension first."""
    sizes = b"".join(size.to_bytes(8, "little") for size in shape)
    numbers = len(shape).to_bytes(4, "little") + sizes + kind.to_bytes(4, "little") + offset.to_bytes(8, "little")
    return len(name).to_bytes(8, "little") + name + numbers


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ((entry(b"a", 32, 4), entry(b"b", 32, 4, offset=511)), "'a' and 'b' at the same bytes"),
        ((entry(b"b", 32, 4, offset=32), entry(b"a", 32, 4)), "'a' and 'b' at the same bytes"),
        ((entry(b"a", 32), entry(b"a", 32, offset=128)), "two tensors of one name"),
        ((entry(b"a", 32, offset=1 << 63),), "truncated: its tensors end at"),
        ((entry(b"a", 32, 1 << 62),), "truncated: its tensors end at"),
        ((entry(b"a", 32, 0),), "impossible shape"),
        ((entry(b"a"),), "impossible shape"),
        ((entry(b"a", 31, kind=2),), "impossible shape"),
        ((entry(b"a", 32, kind=77),), r"a quantisation \(77\) that is not known"),
        ((entry(b"\xff\xfe", 32),), "damaged in its header"),
    ],
)
def test_tensors_that_cannot_be_where_said(tmp_path: Path, entries: tuple[bytes, ...], says: str) -> None:
    said = written(tmp_path / "lies.gguf", *entries, tensors=len(entries), keys=0, size=4096)
    assert re.search(says, refusal(said))


def test_arrays_in_arrays_without_end_are_refused(tmp_path: Path) -> None:
    assert "damaged" in refusal(written(tmp_path / "model.gguf", key(0, ARRAY, array(ARRAY, 1) * 100_000)))


@pytest.mark.parametrize("name", ["a\0b.gguf", "9" * 5000])
def test_note_may_name_impossible_files(tmp_path: Path, name: str) -> None:
    write_gguf_note(tmp_path, [name])
    with pytest.raises(ModelError):
        Checkpoint(tmp_path, 2)
