"""Opens what every model of the Python API stands on: the local part, and a client in a thread of its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ....crypto.identity import Identity, IdentityError, IdentityLocked, held_identity
from ....crypto.swarm_key import SwarmKeyError, find_swarm_key
from ...blocks.client_part import ClientModel, load_client
from ...errors import BadInput, MachineError
from ...models import Progress, resolve
from ...models.adapters.peft_adapter import Adapter
from ...network.addresses import parse_peer
from ...swarm.config import SwarmConfig
from ...swarm.swarm import open_swarm
from ..core import SwarmClient, open_client
from ..session_adapter import choose_adapter, fit_adapter
from ..swarm_model import identify_model
from .runtime import TrioThread


@dataclass(frozen=True)
class Opened:
    """`path` is the folder that the local part was loaded from; `adapter` is None if only servers have it."""

    local: ClientModel
    runtime: TrioThread[SwarmClient]
    path: Path
    adapter: Adapter | None = None


def open_model(
    model: str | os.PathLike[str],
    *,
    initial_peers: Sequence[str] | None,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    revision: str | None,
    allowed_servers: Collection[str] | None,
    blocked_servers: Collection[str] | None,
    progress: Progress,
    swarm_key: str | os.PathLike[str] | None = None,
    identity: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    head: bool = False,
    share_receipts: Sequence[str] = (),
    require_pledge: int | None = None,
    compare_chains: int = 1,
) -> Opened:
    """The arguments are those of `AutoDistributedModelForCausalLM.from_pretrained`. `head`: the model has one of its
    own, which an adapter may bring.

    Raises:
        ModelError: the model cannot be found or used.
        BadInput: an argument that makes no sense, such as a peer address with a typo.
        MachineError: another process holds the identity.
        SwarmError: no peer answers.
    """
    peers = initial_peers
    if peers is None:
        peers = [each for each in os.environ.get("PETALNODE_PEERS", "").split(",") if each.strip()]
    if isinstance(peers, str):
        raise BadInput("initial_peers takes a list of multiaddrs, not one string")
    if not peers:
        raise BadInput("which swarm? Give initial_peers=[...] or set PETALNODE_PEERS")
    if compare_chains < 1:
        raise BadInput(f"compare_chains={compare_chains} makes no sense: 1 compares nothing, 2 or more are compared")
    for auditor in share_receipts:
        parse_peer(auditor)
    try:
        psk = None if swarm_key is None else find_swarm_key(swarm_key)
    except SwarmKeyError as error:
        raise BadInput(str(error)) from error
    chosen = None if adapter is None else choose_adapter(str(adapter))
    folder = resolve(model, need="client", progress=progress, revision=revision)
    dtype_text = str(dtype).removeprefix("torch.")
    local = load_client(folder.path, device="cpu" if device is None else str(device), dtype=dtype_text)
    if isinstance(chosen, Adapter):
        fit_adapter(chosen, local, head=head)

    @asynccontextmanager
    async def resource() -> AsyncIterator[SwarmClient]:
        with ExitStack() as stack:
            own = Identity.generate() if identity is None else _hold(Path(identity), stack)
            config = SwarmConfig(identity=own, listen=(), peers=tuple(peers), psk=psk, serve_dht=False)
            async with open_swarm(config) as swarm:
                identified = await identify_model(swarm, folder, progress)
                async with open_client(
                    swarm,
                    identified,
                    allowed=allowed_servers or (),
                    blocked=blocked_servers or (),
                    share_receipts=share_receipts,
                    require_pledge=require_pledge,
                    compare_chains=compare_chains,
                    adapter=chosen,
                ) as client:
                    yield client

    return Opened(local, TrioThread(resource), folder.path, chosen if isinstance(chosen, Adapter) else None)


def _hold(path: Path, stack: ExitStack) -> Identity:
    """The identity in this file, which is made if missing, for as long as `stack` is open."""
    try:
        return stack.enter_context(held_identity(path, "client", path.parent))
    except IdentityLocked as error:
        raise MachineError(str(error)) from error
    except IdentityError as error:
        raise BadInput(str(error)) from error
