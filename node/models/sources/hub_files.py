"""Which files of a repository on a hub are meant by a kind of weights, or by one of their names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

from ...errors import ModelError

_KIND: Final = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|MXFP4\w*|BF16|F16|F32))(?=[-.])", re.IGNORECASE)
_PART: Final = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_NO_MODEL: Final = ("mmproj", "imatrix")
_NAMED: Final = 12
_MAX_PARTS: Final = 1000


def kind_of(file: str) -> str | None:
    """The kind of weights that the name of a GGUF file states: "Q4_K_M"."""
    found = _KIND.findall(PurePosixPath(file).name)
    return found[-1].upper() if found else None


def choose_gguf(model_id: str, files: Iterable[str], wanted: str) -> tuple[str, ...]:
    """The GGUF files of one model, in order: those of the kind `wanted`, or those of which `wanted` is one.

    Raises:
        ModelError: there are none, or several; or a part is missing.
    """
    every = set(files)
    models = [name for name in sorted(every) if name.lower().endswith(".gguf") and not _is_extra(name)]
    first = [name for name in models if (part := _PART.fullmatch(name)) is None or int(part["number"]) == 1]
    if wanted.lower().endswith(".gguf"):
        found = [name for name in models if name == wanted]
    else:
        found = [name for name in first if kind_of(name) == wanted.upper()]
    if len(found) != 1:
        kinds = list(dict.fromkeys(kind_of(name) or name for name in (found or first)))
        named = ", ".join(found or kinds[:_NAMED]) or "none"
        raise ModelError(
            f"{model_id!r} has {'several GGUF files' if found else 'no GGUF file'} {wanted!r}: name one of {named}"
            f" ({model_id}:KIND, or {model_id}/FILE.gguf)"
        )
    part = _PART.fullmatch(found[0])
    if part is None:
        return (found[0],)
    count = int(part["count"])
    names = [f"{part['name']}-{number:05}-of-{part['count']}.gguf" for number in range(1, min(count, _MAX_PARTS) + 1)]
    missing = [name for name in names if name not in every]
    if missing or not 1 <= count <= _MAX_PARTS:
        raise ModelError(
            f"{model_id!r} is incomplete on the hub: of {count} parts {missing[:1] or 'too many'} is missing."
        )
    return tuple(names)


def name_of(model_id: str, files: Iterable[str], first: str) -> str:
    """What announcements call the model of the GGUF file `first`: by its kind, where that says which it is."""
    kind = kind_of(first)
    try:
        if kind is not None and choose_gguf(model_id, files, kind)[0] == first:
            return f"{model_id}:{kind}"
    except ModelError:
        pass
    return f"{model_id}/{first}"


def _is_extra(name: str) -> bool:
    return any(word in PurePosixPath(name).name.lower() for word in _NO_MODEL)
