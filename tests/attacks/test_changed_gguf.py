"""Somebody else writes to a GGUF file that is served, or to what petalnode has noted of it.

Who: a download that goes on, another program, another user of a shared disk. What he gains without these: blocks of two
files, or of a file that was never checked, or a server that ends by a bus error. What bounds it: weights are held in
the memory of the process; each reading of the file compares its size and time with those when its header was read; the
digests of the parts are kept for these only. Who cuts safetensors, which are mapped, ends the
server, which says why.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from petalnode.node.blocks.kernels.library import library
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.errors import ModelError
from petalnode.node.models import ModelFolder, compute_manifest, resolve, verify_part
from petalnode.node.models.gguf.header import read_gguf_header
from petalnode.node.models.gguf.stored import stored_rows
from petalnode.protocols.ids import Span
from tests.swarm.processes import nodes
from tests.tiny_gguf import BLOCKS, HIDDEN, write_tiny_gguf
from tests.tiny_models import save_tiny


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    return write_tiny_gguf(tmp_path / "model.gguf")


def loaded(folder: ModelFolder) -> BlockSpan:
    return load_span(folder.path, Span(0, BLOCKS), device="cpu", dtype="float32", kernels="auto")


def answer(blocks: BlockSpan) -> torch.Tensor:
    hidden = torch.randn(1, 3, HIDDEN, generator=torch.Generator().manual_seed(0))
    return blocks.forward(hidden, blocks.make_cache(1, 3))


def test_what_is_served_stays_as_it_was_checked(file: Path) -> None:
    blocks = loaded(resolve(file))
    before = answer(blocks)
    with file.open("r+b") as stream:
        stream.seek(read_gguf_header(file).end)
        stream.write(os.urandom(file.stat().st_size - read_gguf_header(file).end))
    assert torch.equal(answer(blocks), before)
    os.truncate(file, 100)
    assert torch.equal(answer(blocks), before)


def test_file_that_changes_while_read_is_not_used(file: Path) -> None:
    held = read_gguf_header(file).tensors[4]
    with file.open("r+b") as stream:
        stream.seek(-7, os.SEEK_END)
        stream.write(b"changed")
    os.utime(file, ns=(0, held.stamp[1] + 1))
    with pytest.raises(ModelError, match=r"model\.gguf changed while it was read\. Run it again"):
        stored_rows(file, held, 0, 4)


def test_other_weights_under_same_header_are_another_version(file: Path) -> None:
    folder = resolve(file)
    manifest = compute_manifest(folder)
    data = bytearray(file.read_bytes())
    place = next(held for held in read_gguf_header(file).tensors if held.name == "blk.1.ffn_up.weight")
    data[place.start + 5] ^= 16
    file.write_bytes(data)
    os.utime(file, ns=(0, place.stamp[1] + 1))
    assert resolve(file).path == folder.path
    verify_part(folder, manifest, Span(0, 1))
    with pytest.raises(ModelError, match="block 1 differs"):
        verify_part(folder, manifest, Span(0, 2))


@pytest.mark.parametrize("note", ['{"files": []}', '{"files": 7}', "[]", '{"files": ["/nowhere.gguf"]}', "\xff" * 9])
def test_a_damaged_note_is_an_error(file: Path, note: str) -> None:
    folder = resolve(file)
    (folder.path / "gguf.json").write_bytes(note.encode("latin-1"))
    with pytest.raises(ModelError, match=r"gguf\.json is damaged|Cannot read /nowhere\.gguf"):
        compute_manifest(folder)


_CUT = """
import os, pathlib, sys, torch
from petalnode.node.blocks.span import load_span
from petalnode.protocols.ids import Span

folder = pathlib.Path(sys.argv[1])
blocks = load_span(folder, Span(0, 6), device="cpu", kernels="auto")
os.truncate(folder / "model.safetensors", 100)
blocks.forward(torch.zeros(1, 3, blocks.hidden_size), blocks.make_cache(1, 3))
print("answered")
"""


@pytest.mark.skipif(library() is None, reason="the kernels are not built (make setup, with a C compiler)")
def test_cut_of_a_mapped_file_is_said(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model", hidden_size=256, intermediate_size=1024)
    ended = subprocess.run([sys.executable, "-c", _CUT, folder], capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and not ended.stdout, ended
    assert "became shorter" in ended.stderr and "copy or download it again" in ended.stderr, ended


def test_server_ends_when_its_file_is_written_to(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    with nodes(tmp_path / "nodes") as started:
        server = started.server(folder, "0:6")
        assert server.ready
        with (folder / "model.safetensors").open("r+b") as stream:
            stream.seek(-4, os.SEEK_END)
            stream.write(bytes(4))
        assert server.wait() == 2 and "model.safetensors was written to while it was served" in server.errors, (
            server.errors
        )
