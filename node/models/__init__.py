"""Models on this machine: finding and fetching them, reading their weights' layout, and the model version.

Nothing here imports torch or transformers at start-up: only reading tensors and the first look at a GGUF file do.
May use `errors`.
"""

from __future__ import annotations

from .cache_dir import cache_dir
from .checkpoint import Checkpoint
from .folder import ModelFolder, hidden_size, num_blocks
from .manifest import Manifest, check_pinned, compute_manifest, held_weights, stated_manifest, verify_part
from .parts import EMBEDDINGS, HEAD, Need, Part
from .progress import Progress, no_progress
from .sources.alias import ALIASES
from .sources.resolve import DEFAULT_MODEL, resolve, split_version

__all__ = [
    "ALIASES",
    "DEFAULT_MODEL",
    "EMBEDDINGS",
    "HEAD",
    "Checkpoint",
    "Manifest",
    "ModelFolder",
    "Need",
    "Part",
    "Progress",
    "cache_dir",
    "check_pinned",
    "compute_manifest",
    "held_weights",
    "hidden_size",
    "no_progress",
    "num_blocks",
    "resolve",
    "split_version",
    "stated_manifest",
    "verify_part",
]
