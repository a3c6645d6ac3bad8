"""A faster start: what a command has no use for is imported when it is used.

libp2p imports all its transports, QUIC and TLS among them, and transformers all its ways to distribute a model: a third
of the processor time of a start (benchmarks/RESULTS.md). Here a package runs its `__init__` when it is asked for a name
that is none of its modules. A name of a module stands for the class or function. That is imported when it is called,
looked into or inherited from. Processes of commands do this; the Python API imports all as usual.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Union

from ..errors import PetalnodeError

if TYPE_CHECKING:
    from importlib.abc import Loader

PACKAGES: Final = frozenset(
    (
        "libp2p",
        "libp2p.discovery.mdns",
        "libp2p.relay",
        "libp2p.relay.circuit_v2",
        "libp2p.security.tls",
        "libp2p.transport",
        "torch._dynamo",
        "torch._meta_registrations",
        "torch.export",
    )
)
MODULES: Final = frozenset(
    (
        "Crypto.Cipher.Salsa20",
        "Crypto.Hash.SHA256",
        "Crypto.PublicKey.RSA",
        "libp2p.bitswap",
        "libp2p.bitswap.cid",
        "libp2p.discovery.mdns.mdns",
        "libp2p.security.tls.autotls.acme",
        "libp2p.security.tls.autotls.broker",
        "libp2p.transport.quic.stream",
        "multiaddr.resolvers",
        "prometheus_client",
        "scipy.optimize",
        "torch._dynamo._trace_wrapped_higher_order_op",
        "transformers.distributed.checkpoint",
        "transformers.distributed.expert_parallel",
        "transformers.distributed.fsdp",
        "transformers.distributed.parallel_utils",
        "transformers.distributed.sharding_utils",
        "transformers.distributed.tensor_parallel",
        "transformers.distributed.utils",
        "transformers.generation.continuous_batching",
        "transformers.generation.continuous_batching.cache",
    )
)
_EMPTY_BASES: Final = frozenset((("transformers.generation.continuous_batching", "ContinuousMixin"),))
"""Bases of classes whose methods no command calls; others are imported by the class that inherits from them."""
_LATE_OBJECTS: Final = frozenset((("multiaddr.resolvers", "DNSResolver"),))
"""Classes of which an object is made at the start, and used later or never."""


def _no(*_: object, **__: object) -> bool:
    return False


_ANSWERS: Final = {
    ("transformers.distributed.fsdp", "is_fsdp_enabled"): _no,
    ("transformers.distributed.fsdp", "is_fsdp_managed_module"): _no,
    ("transformers.distributed.utils", "is_dtensor"): _no,
}
"""What is asked of modules that no command uses."""
_STRUCTURES: Final = "transformers.utils.import_utils"
_READ_STRUCTURE: Final = "create_import_structure_from_path"
_REMEMBERED: Final = "transformers-models.json"

_lock = threading.Lock()
_wanted: set[str] = set()
"""Modules of which something was used."""


def defer() -> None:
    """From now on, in this process; what is imported already stays."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds what is deferred, and leaves all else to the finders after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        run: Callable[[Loader, ModuleType], None] = _run_when_asked
        if name in MODULES and name not in _wanted:
            run = _stand_in
        elif name == _STRUCTURES:
            run = _run_remembering
        elif name not in PACKAGES:
            return None
        real = PathFinder.find_spec(name, path, target)
        if real is None or real.loader is None:
            return None
        spec = ModuleSpec(name, _Loader(real.loader, run), origin=real.origin)  # type: ignore[arg-type]  # all is there
        spec.submodule_search_locations = real.submodule_search_locations
        spec.has_location = real.has_location
        return spec


@dataclass(frozen=True)
class _Loader:
    real: Loader
    run: Callable[[Loader, ModuleType], None]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self.run(self.real, module)


def _run_when_asked(real: Loader, module: ModuleType) -> None:
    lock, done = threading.RLock(), False

    def get(name: str) -> Any:
        nonlocal done
        if name.startswith("__"):
            raise AttributeError(name)
        with lock:
            if not done:
                done = True
                if module.__name__ == "torch._dynamo":  # whose parts import each other in one order only
                    _ = import_module("torch._meta_registrations").activate_meta
                real.exec_module(module)
        if name not in module.__dict__:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return module.__dict__[name]

    module.__dict__["__getattr__"] = get
    if module.__name__ == "torch._dynamo":
        module.__dict__.update(_MARKS)
    if module.__name__ == "torch._meta_registrations":  # by what it imports this is done, and torch.Generator needs it
        kind = import_module("torch._opaque_base").OpaqueBaseMeta
        import_module("torch._C")._set_generator_metaclass(kind)


def _stand_in(_: Loader, module: ModuleType) -> None:
    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        place = module.__name__, name
        found = _ANSWERS.get(place) or Deferred(lambda: _imported(module, name), place)
        return module.__dict__.setdefault(name, found)

    module.__dict__["__getattr__"] = get


def _run_remembering(real: Loader, module: ModuleType) -> None:
    """Lets transformers remember which model has what, for which it reads a thousand files, twice."""
    real.exec_module(module)
    read = module.__dict__.get(_READ_STRUCTURE)
    if read is not None:
        module.__dict__[_READ_STRUCTURE] = remembered(read)


def _imported(stand_in: ModuleType, name: str) -> Any:
    """What the module has under this name for which `stand_in` stands."""
    with _lock:
        if sys.modules.get(stand_in.__name__) is stand_in:
            _wanted.add(stand_in.__name__)
            del sys.modules[stand_in.__name__]
    return getattr(import_module(stand_in.__name__), name)


class Deferred:
    """A class, a function or an object that is made when it is used.

    Args:
        make: what makes it.
        place: the module and the name by which others find it.
    """

    def __init__(self, make: Callable[[], Any], place: tuple[str, str]) -> None:
        self._make = make
        self._place = place

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._place in _LATE_OBJECTS:
            return Deferred(cache(lambda: self._make()(*arguments, **named)), ("", ""))
        return self._make()(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what annotations ask a type for
            raise AttributeError(name)
        return getattr(self._make(), name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return () if self._place in _EMPTY_BASES else (self._make(),)

    def __instancecheck__(self, instance: object) -> bool:
        # A class that nobody has imported has no instances.
        return self._place[0] in _wanted and isinstance(instance, self._make())

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007  # `|` is what is defined here

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007


def unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    """`function`; without one, a decorator that does nothing."""
    return (lambda decorated: decorated) if function is None else function


_MARKS: Final = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable", "nonstrict_trace"), unmarked)
"""Of functions for torch's compiler, which transformers sets: they import all of it, and no command compiles."""


def remembered(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """As `read`, but what it says of the folder of all models is kept in a file. That holds while the package is the
    same."""

    def structure(path: Any) -> Any:
        folder = os.path.dirname(path) if str(path).endswith(".py") else os.fspath(path)
        if os.path.basename(folder) != "models":
            return read(path)
        from ..models.cache_dir import cache_dir, keep_json

        package = os.path.dirname(folder)
        try:
            changed = [os.stat(file).st_mtime_ns for file in (folder, os.path.join(package, "__init__.py"))]
            file = cache_dir() / _REMEMBERED
        except (OSError, PetalnodeError):
            return read(path)
        key = [folder, *changed]
        try:
            kept = json.loads(file.read_bytes())
            if kept["key"] == key:
                return _from_json(kept["structure"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # none there, or no such file
        found = read(path)
        keep_json(file, {"key": key, "structure": _to_json(found)})
        return found

    return structure


def _to_json(structure: Any) -> Any:
    """Of dicts whose keys are texts or frozensets of texts, and sets of texts."""
    if not isinstance(structure, dict):
        return sorted(structure)
    return {"of": [[key if isinstance(key, str) else sorted(key), _to_json(value)] for key, value in structure.items()]}


def _from_json(kept: Any) -> Any:
    if not isinstance(kept, dict):
        return set(kept)
    return {key if isinstance(key, str) else frozenset(key): _from_json(value) for key, value in kept["of"]}
