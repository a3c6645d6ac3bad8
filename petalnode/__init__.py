"""petalnode: run language models over a swarm of ordinary machines, peer to peer.

from petalnode import AutoDistributedModelForCausalLM

with AutoDistributedModelForCausalLM.from_pretrained("smollm2", initial_peers=[...]) as model:
    model.generate(**inputs, max_new_tokens=20)
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout the rooms stand beside this folder, and not in it. Python finds this folder before an installed package.
_checkout = Path(__file__).parent.parent
if not Path(__file__).with_name("node").is_dir() and (_checkout / "node" / "version.py").is_file():
    __path__.append(str(_checkout))

from .node.version import __version__  # noqa: E402 - the rooms are found by then

__all__ = [
    "AutoDistributedModelForCausalLM",
    "AutoDistributedModelForSequenceClassification",
    "BadInput",
    "LoraTuning",
    "ModelError",
    "NoChainError",
    "PetalnodeError",
    "PromptTuning",
    "RemoteSequential",
    "ServerFailed",
    "SwarmError",
    "__version__",
    "load_adapter",
]

if TYPE_CHECKING:
    from .node.client.api.causal_lm import AutoDistributedModelForCausalLM
    from .node.client.api.classification import AutoDistributedModelForSequenceClassification
    from .node.client.api.remote import RemoteSequential
    from .node.client.api.tuning import LoraTuning, PromptTuning
    from .node.errors import BadInput, ModelError, NoChainError, PetalnodeError, ServerFailed, SwarmError
    from .node.tuning.adapter_folder import load_adapter


_IN_MODULES = {
    "AutoDistributedModelForCausalLM": "client.api.causal_lm",
    "AutoDistributedModelForSequenceClassification": "client.api.classification",
    "LoraTuning": "client.api.tuning",
    "PromptTuning": "client.api.tuning",
    "RemoteSequential": "client.api.remote",
    "load_adapter": "tuning.adapter_folder",
}


def __getattr__(name: str) -> Any:
    # On first use: the command line needs neither torch nor transformers for most of what it does.
    if name in _IN_MODULES:
        return getattr(import_module(f".node.{_IN_MODULES[name]}", __name__), name)
    if name in __all__:
        from .node import errors

        return getattr(errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
