"""docs/models.md says of every causal type of the installed transformers what `make sweep` found of it.

What needs no server is tried here: the page names all types, and those that are refused are, before anything is loaded.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from petalnode.node.blocks.architecture import open_skeleton
from petalnode.node.errors import ModelError
from petalnode.node.models.folder import num_blocks, read_config
from tests.sweep.__main__ import MARKS, PAGE
from tests.sweep.configs import tiny_config

_ROWS = [
    line.strip("| \n").split(" | ")
    for line in PAGE.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0].splitlines()
    if line.startswith("| ") and not line.startswith("| |")
]
SAID = {kind: said for said, kinds in _ROWS for kind in kinds.split(", ")}
OPENED = [kind for kind, said in SAID.items() if not said.startswith("not built")]


def test_the_page_names_every_causal_type_of_transformers() -> None:
    assert sorted(SAID) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not [kind for kind, said in SAID.items() if not said.startswith(("exact", "refused: ", "not built: "))]


@pytest.mark.parametrize("kind", OPENED)
def test_refusals_come_before_loading(kind: str, tmp_path: Path) -> None:
    tiny_config(kind).save_pretrained(tmp_path)
    try:
        num_blocks(read_config(tmp_path))
        open_skeleton(tmp_path)
        refused = False
    except ModelError:
        refused = True
    assert refused == SAID[kind].startswith("refused")
