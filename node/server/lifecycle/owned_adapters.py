"""The adapters that a server's owner names: read and checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ...errors import BadInput
from ...models.adapters.peft_adapter import Adapter, read_adapter

MAX_LOADED: Final = 32
"""Each takes a line of the announcement."""


def read_owned(folders: Sequence[Path], model_version: bytes, model: str) -> list[Adapter]:
    """
    Raises:
        BadInput: one cannot be used for this model, two have one name, or there are too many.
    """
    if len(folders) > MAX_LOADED:
        raise BadInput(
            f"{len(folders)} adapters are more than a server announces: give --adapter at most {MAX_LOADED} times"
        )
    adapters: list[Adapter] = []
    for folder in folders:
        adapter = read_adapter(folder)
        if adapter.soft_prompt is not None or not adapter.tensors:
            raise BadInput(f"{folder} is a prompt, which its user has: a server loads LoRA adapters only")
        adapter.check_model(model_version, model)
        if any(each.name == adapter.name for each in adapters):
            raise BadInput(f"two adapters are called {adapter.name}: rename the folder of one of them")
        adapters.append(adapter)
    return adapters
