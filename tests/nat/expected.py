"""What plain transformers says, for the tests with NATs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.nat.clients import PROMPT


class Expected:
    """What plain transformers generates after PROMPT."""

    def __init__(self, folder: Path) -> None:
        import torch

        from tests.tiny_models import load_whole

        torch.set_num_threads(1)
        self._model = load_whole(folder)
        self._known: list[int] = []

    def __call__(self, ids: Sequence[int]) -> list[int]:
        """The first tokens, as many as `ids`."""
        import torch

        if len(self._known) < len(ids):
            length = max(len(ids), 2 * len(self._known))
            out = self._model.generate(
                torch.tensor([PROMPT]), max_new_tokens=length - len(PROMPT), do_sample=False, pad_token_id=0
            )
            self._known = out[0].tolist()
        return self._known[: len(ids)]
