"""What a command imports late: other packages do what they always do, and a start leaves the expensive ones out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petalnode.node.cli import deferred

_FILES = {
    "latepkg/__init__.py": "from .heavy import Heavy, LIMIT\nname = 'package'",
    "latepkg/light.py": "from latepkg.heavy import Heavy, Base\nclass Child(Base): pass\nclass Bare(Heavy): pass\n"
    "def accepts(value: Heavy | None) -> bool: return isinstance(value, Heavy)",
    "latepkg/heavy.py": "import latepkg.ran\nLIMIT = 3\nclass Base:\n size = 7\nclass Heavy:\n"
    " def __init__(self, value=0): self.value = value\n @classmethod\n def of(cls, value): return cls(value)\n"
    "def make(value): return Heavy(value)",
    "latepkg/ran.py": "",
}


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package, one of whose modules is deferred; `latepkg.ran` is imported by that module."""
    for name, text in _FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(deferred, "PACKAGES", frozenset(("latepkg",)))
    monkeypatch.setattr(deferred, "MODULES", frozenset(("latepkg.heavy",)))
    monkeypatch.setattr(deferred, "_EMPTY_BASES", frozenset((("latepkg.heavy", "Heavy"),)))
    monkeypatch.setattr(deferred, "_wanted", set())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    deferred.defer()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "latepkg"]:
        del sys.modules[name]


def test_package_runs_when_it_is_asked_for_name(late: None) -> None:
    import latepkg.ran  # type: ignore[import-not-found]

    assert "name" not in vars(latepkg)
    assert latepkg.name == "package"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = latepkg.nothing
    with pytest.raises(ImportError):
        from latepkg import neither  # type: ignore[import-not-found]  # noqa: F401


def test_module_is_imported_at_its_first_use(late: None) -> None:
    from latepkg.heavy import Heavy, make  # type: ignore[import-not-found]

    assert not isinstance(3, Heavy)
    _ = Heavy | None, None | Heavy
    assert "latepkg.ran" not in sys.modules
    made: Any = make(4)
    assert "latepkg.ran" in sys.modules
    assert made.value == 4 and isinstance(made, Heavy) and not isinstance(3, Heavy)
    assert Heavy(5).value == Heavy.of(5).value == 5
    assert sys.modules["latepkg.heavy"].Heavy is type(made), "a later import has the real module"


def test_a_class_inherits_from_the_real_one(late: None) -> None:
    from latepkg.light import Bare, Child, accepts  # type: ignore[import-not-found]

    assert Child().size == 7
    assert Bare.__mro__ == (Bare, object), "a base that no command calls is left out"
    assert not accepts(None)


def test_an_object_may_be_made_late(late: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "_LATE_OBJECTS", frozenset((("latepkg.heavy", "Heavy"),)))
    from latepkg.heavy import Heavy

    made = Heavy(6)
    assert "latepkg.ran" not in sys.modules
    assert made.value == 6


def test_what_transformers_reads_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    models = tmp_path / "package" / "models"
    models.mkdir(parents=True)
    (models.parent / "__init__.py").write_text("")
    (models / "__init__.py").write_text("")
    found = {"llama": {frozenset(("torch", "vision")): {"modeling": {"A", "B"}}, frozenset(): {"configuration": {"C"}}}}
    calls = []

    def read(path: Any) -> Any:
        calls.append(path)
        return found

    structure = deferred.remembered(read)
    for path in (models, str(models / "__init__.py"), models):
        assert structure(path) == found
    assert len(calls) == 1
    assert structure(models.parent) == found and len(calls) == 2, "other folders are read"
    os.utime(models.parent / "__init__.py", ns=(1, 1))
    assert structure(models) == found and len(calls) == 3, "another version of the package is read again"
    (kept,) = (tmp_path / "cache").iterdir()
    for damage in (b"{", b"[]", b'{"key": 1}', b"\xff"):
        kept.write_bytes(damage)
        assert structure(models) == found


_START = """
import sys
from petalnode.node.cli import deferred
deferred.defer()
import petalnode.node.cli.commands.status
unused = {"aioquic", "dns", "httpx", "OpenSSL", "prometheus_client.metrics", "requests", "zeroconf"}
assert not unused & set(sys.modules), unused & set(sys.modules)
import petalnode.node.client.generation.conversation, petalnode.node.blocks.client_part
import transformers.models.llama.modeling_llama
from transformers import CTRLConfig, LlamaConfig
from petalnode.node.blocks.skeleton import build
import torch
build(LlamaConfig(num_hidden_layers=1), torch.float32)
torch.randn(2, generator=torch.Generator().manual_seed(1))
unused = {"torch._dynamo.convert_frame", "torch.distributed.tensor._ops", "torch._export", "torch._refs"}
unused |= {"scipy.linalg", "sympy"}
assert not unused & set(sys.modules), unused & set(sys.modules)
build(CTRLConfig(n_layer=1), torch.float32)
assert "torch._refs" in sys.modules, "what makes tensors without memory in Python is there when a model needs it"
import libp2p
assert libp2p.new_host and torch._dynamo.config and torch.export.export  # whoever needs them has them
from libp2p.transport.quic.stream import QUICStream
from libp2p.custom_types import TQUICStreamHandlerFn
assert QUICStream.read
"""


def test_a_start_leaves_out_what_no_command_uses() -> None:
    done = subprocess.run([sys.executable, "-c", _START], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
