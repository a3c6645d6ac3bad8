from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from petalnode.node.server.lifecycle.memory import (
    Memory,
    claim,
    claimed_by_others,
    container_limit,
    device_memory,
    library_pages,
    unused,
)

GIB = 1 << 30


pytestmark = pytest.mark.usefixtures("cache")


def group(folder: Path, limit: str, used: int, of_files: int, *, old: bool = False) -> None:
    """Half of the pages of files were used lately; an older system says of each group what is its own as well."""
    folder.mkdir(parents=True)
    (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if old else "memory.current")).write_text(f"{used}\n")
    kinds = f"inactive_file {of_files - of_files // 2}", f"active_file {of_files // 2}"
    lines = [*(("inactive_file 7", *(f"total_{kind}" for kind in kinds)) if old else kinds), "anon 1"]
    (folder / "memory.stat").write_text("\n".join(lines) + "\n")


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "sys"
    assert container_limit(root, own) is None
    own.write_text("0::/user.slice/petalnode.service\n")
    group(root / "user.slice" / "petalnode.service", "max", 3 * GIB, 0)
    assert container_limit(root, own) is None
    group(root / "elsewhere", str(GIB), 0, 0)
    (root / "user.slice" / "memory.max").write_text(str(8 * GIB))
    (root / "user.slice" / "memory.current").write_text(str(5 * GIB))
    (root / "user.slice" / "memory.stat").write_text(f"inactive_file {GIB}\n")
    assert container_limit(root, own) == Memory(4 * GIB, 8 * GIB)
    (root / "user.slice" / "memory.current").write_text(str(10 * GIB))  # it may have been lowered
    assert container_limit(root, own) == Memory(0, 8 * GIB)


def test_the_limit_of_an_older_system_counts(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "sys"
    own.write_text("11:cpu,cpuacct:/docker/a\n4:memory:/docker/a:1\n0::/system.slice\n")
    group(root / "memory" / "docker" / "a:1", str(2 * GIB), GIB, GIB // 2, old=True)
    assert container_limit(root, own) == Memory(3 * GIB // 2, 2 * GIB)
    # In a container its own group is seen at the root, whatever its path is outside.
    group(root / "other", "1", 0, 0)
    own.write_text("4:memory:/docker/b\n")
    (root / "memory" / "memory.limit_in_bytes").write_text(str(1 << 63))
    assert container_limit(root, own) is None


def test_what_another_server_has_claimed_is_not_free(cache: Path) -> None:
    claim(100 * GIB)
    assert claimed_by_others() == 0  # this process knows what it takes itself
    code = (
        "import sys; from petalnode.node.server.lifecycle.memory import claim; claim(1 << 40)\n"
        "print(flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "\n"
        assert 0.9 * (1 << 40) < claimed_by_others() <= 1 << 40
        assert device_memory("cpu").free == 0
    finally:
        other.communicate()
    assert claimed_by_others() == 0
    assert not (cache / "claims" / f"{other.pid}.json").exists()
    assert device_memory("cpu").free > 0


def test_damaged_and_reused_numbers_claims_count_nothing(cache: Path) -> None:
    claim(1)
    parent = psutil.Process().ppid()
    for text in ("", "{}", "[]", '{"bytes": "much", "started": 1}', json.dumps({"started": 1.0, "bytes": 1 << 40})):
        (cache / "claims" / f"{parent}.json").write_text(text)
        assert claimed_by_others() == 0


def test_mapped_weights_are_not_in_use_yet() -> None:
    assert unused(0) == 0
    assert unused(1 << 40) > 0.9 * (1 << 40)


def test_unwritten_pages_of_libraries_are_found() -> None:
    def region(place: str, rights: str, file: str, anonymous: int) -> str:
        size = f"Rss:                  64 kB\nAnonymous:      {anonymous:8} kB\n"
        return f"{place} {rights} 00000000 fe:00 77 {file}\nSize:                 64 kB\n{size}VmFlags: rd mr mw me\n"

    said = [
        region("7f0000000000-7f0000010000", "r-xp", "                    /usr/lib/libtorch_cpu.so", 0),
        region("7f0000010000-7f0000020000", "r--p", "                    /usr/lib/libc.so.6", 0),
        region("7f0000020000-7f0000030000", "r--p", "                    /usr/lib/libc.so.6", 8),  # relocated
        region("7f0000030000-7f0000040000", "rw-p", "                    /usr/lib/libc.so.6", 0),
        region("7f0000040000-7f0000050000", "r--p", "                    /home/ann/model.gguf", 0),
        region("7f0000050000-7f0000060000", "r-xp", "", 0),
    ]
    found = [(0x7F0000000000, 0x7F0000010000), (0x7F0000010000, 0x7F0000020000)]
    assert library_pages("".join(said)) == found


@pytest.mark.skipif(sys.platform != "linux", reason="mappings of Linux")
def test_memory_is_returned_and_libraries_work_on() -> None:
    """In a process of its own, which has torch and has used it."""
    program = """
import torch
from petalnode.node.server.lifecycle.memory import return_memory
def files():
    said = open("/proc/self/status").read()
    return int(said.partition("RssFile:")[2].split()[0])
before = files()
return_memory()
after = files()
assert after < before / 2, (before, after)
assert torch.ones(300, 300).matmul(torch.ones(300, 300)).sum() == 300**3
"""
    subprocess.run([sys.executable, "-c", program], check=True)
