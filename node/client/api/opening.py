"""How a model of the swarm is opened: its options, embeddings and head on this machine, and a client in its thread."""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, ParamSpec, TypedDict, TypeVar, get_type_hints

import torch

from ....crypto.identity import Identity, IdentityError, IdentityLocked, held_identity, peer_id_to_bytes
from ....crypto.swarm_key import SwarmKeyError, find_swarm_key
from ...blocks.architecture import check_download
from ...blocks.client_part import ClientModel, load_client
from ...errors import BadInput, MachineError, ModelError
from ...links.format import read_target
from ...models import ModelFolder, Progress, resolve
from ...models.adapter import Adapter
from ...models.progress import no_progress
from ...network.addresses import parse_peer
from ...swarm.config import SwarmConfig
from ...swarm.swarm import Swarm, open_swarm
from ...swarm.trusted_servers import TrustedServers, trusted_servers
from ...weights.remote_model import find_instead, may_be_remote
from ..core import CODEC_OF, ClientOptions, SwarmClient, open_client, parse_codec
from ..session_adapter import choose_adapter, fit_adapter
from ..swarm_model import identify_model
from .runtime import TrioThread

P = ParamSpec("P")
T = TypeVar("T")


class ModelOptions(TypedDict, total=False):
    """The keyword arguments that every `from_pretrained` takes.

    Args:
        initial_peers: multiaddrs of nodes to join through, or links; by default PETALNODE_PEERS, comma-separated.
        dtype: of the local part and of the hidden states that are sent; "auto" is the checkpoint's.
        device: of the local part; None is the CPU.
        revision: of a model on the hub: a branch, tag or commit.
        swarm_key: of a private swarm: its file, or its 64 hexadecimal digits.
        identity: file of this client's private key, created if missing; by default a new key each time. Servers started
            with `petalnode serve --allow-client` accept only clients whose peer id they know.
        allowed_servers: peer ids of the only servers to use; None allows all.
        blocked_servers: peer ids of servers never to use.
        trusted_servers: peer ids of the only servers that compute the first and the last `trusted_blocks` blocks (2).
            From these a server can tell the text. Others compute the rest. None lets all servers compute all blocks.
        trusted_blocks: how many blocks at each end are for trusted servers only.
        share_receipts: multiaddrs with /p2p of auditors that are sent receipts and hidden states, which show them the
            text.
        require_pledge: use only servers that pledge at least this many points.
        compare_chains: from 2 on, sessions (and `generate`) run every step on this many chains that share no server,
            and compare their outputs. See `disagreements`. Calls without a cache are not compared.
        request_timeout: seconds that a server may take for one step.
        codec: how the hidden states of sessions (and `generate`) travel: "none" as they are, "float16", "bfloat16" or
            "int8". "auto" takes one from the second session on. It has to save a tenth of the time by the measured
            bandwidth, and round by 0.1 % at most.
        batch_codec: the same for calls without a cache and their gradients, without "auto".
        prefix_salt: a secret of at least 16 characters. Servers with `--prefix-cache salted` let all who know it use
            what they have computed for one of them. Those can tell by the time that a server takes which texts the
            others have sent.
        wait: while no chain of servers covers the model, wait for one instead of raising.
        adapter: a folder with a LoRA adapter or a prompt in peft's format. It is sent to servers that do not hold it.
            Or the name of a LoRA adapter that servers hold: then only those servers are used.
        progress: called with what is downloaded or read, and how far it is.
    """

    initial_peers: Sequence[str] | None
    dtype: str | torch.dtype
    device: str | torch.device | None
    revision: str | None
    swarm_key: str | os.PathLike[str] | None
    identity: str | os.PathLike[str] | None
    allowed_servers: Collection[str] | None
    blocked_servers: Collection[str] | None
    trusted_servers: Collection[str] | None
    trusted_blocks: int | None
    share_receipts: Sequence[str]
    require_pledge: int | None
    compare_chains: int
    request_timeout: float | None
    codec: str
    batch_codec: str
    prefix_salt: str
    wait: bool
    adapter: str | os.PathLike[str] | None
    progress: Progress


DEFAULTS: Final = ModelOptions(
    initial_peers=None,
    dtype="auto",
    device=None,
    revision=None,
    swarm_key=None,
    identity=None,
    allowed_servers=None,
    blocked_servers=None,
    trusted_servers=None,
    trusted_blocks=None,
    share_receipts=(),
    require_pledge=None,
    compare_chains=1,
    request_timeout=None,
    codec="none",
    batch_codec="none",
    prefix_salt="",
    wait=False,
    adapter=None,
    progress=no_progress,
)


def takes_model_options(function: Callable[P, T]) -> Callable[P, T]:
    """Puts each keyword of `**options: Unpack[ModelOptions]` into the signature and the docstring, for `help`."""
    types = get_type_hints(ModelOptions)
    signature = inspect.signature(function)
    named = [parameter for parameter in signature.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in DEFAULTS.items()
    ]
    function.__signature__ = signature.replace(parameters=[*named, *keywords])  # type: ignore[attr-defined]
    arguments = inspect.cleandoc(ModelOptions.__doc__ or "").partition("Args:\n")[2]
    own, _, raises = inspect.cleandoc(function.__doc__ or "").partition("\n\nRaises:")
    function.__doc__ = f"{own}\n{arguments}\n\nRaises:{raises}"
    return function


@dataclass(frozen=True)
class OpenedModel:
    """The parts of a model that is open: embeddings and head here, and a client of the swarm in its own thread.

    Attributes:
        path: the folder that the local part was loaded from.
        adapter: what the model was opened with; None if there is none, or only servers hold it.
        wait, request_timeout, batch_codec: as in `ModelOptions`.
    """

    local: ClientModel
    runtime: TrioThread[SwarmClient]
    path: Path
    adapter: Adapter | None = None
    wait: bool = False
    request_timeout: float | None = None
    batch_codec: str = "none"


def open_model(model: str | os.PathLike[str], options: ModelOptions, *, head: bool = False) -> OpenedModel:
    """Loads the local part of `model` and joins the swarm. `head`: an adapter may bring a head of its own.

    Raises:
        ModelError: the model cannot be found or used.
        BadInput: an argument that makes no sense, such as a peer address with a typo.
        MachineError: another process uses the identity.
        SwarmError: no peer answers.
        TypeError: there is no such option.
    """
    if unknown := options.keys() - DEFAULTS.keys():
        raise TypeError(f"from_pretrained() got an unexpected keyword argument {min(unknown)!r}")
    given: ModelOptions = {**DEFAULTS, **options}
    peers = _peers(given["initial_peers"])
    compare_chains, share_receipts = given["compare_chains"], given["share_receipts"]
    if compare_chains < 1:
        raise BadInput(f"compare_chains={compare_chains}: give the number of chains, 1 to compare nothing")
    if 0 < len(given["prefix_salt"]) < 16:
        raise BadInput("prefix_salt takes at least 16 characters that nobody can guess")
    for auditor in share_receipts:
        parse_peer(auditor)
    trusted = _trusted(given)
    codec, batch_codec = parse_codec(given["codec"]), parse_codec(given["batch_codec"], tuple(CODEC_OF))
    try:
        psk = None if given["swarm_key"] is None else find_swarm_key(given["swarm_key"])
    except SwarmKeyError as error:
        raise BadInput(str(error)) from error
    swarm_of = read_target(peers, psk)
    adapter = None if given["adapter"] is None else choose_adapter(str(given["adapter"]))
    own = _own_folder(model, given)
    local = _local_part(own, given, adapter, head) if isinstance(own, ModelFolder) else None

    asked = ClientOptions(
        allowed=given["allowed_servers"] or (),
        blocked=given["blocked_servers"] or (),
        share_receipts=share_receipts,
        require_pledge=given["require_pledge"],
        compare_chains=compare_chains,
        trusted=trusted,
        adapter=adapter,
        codec=codec,
    )

    @asynccontextmanager
    async def client() -> AsyncIterator[SwarmClient]:
        with ExitStack() as stack:
            identity = _identity(given["identity"], stack)
            config = SwarmConfig(identity=identity, listen=(), peers=swarm_of.peers, psk=swarm_of.psk, serve_dht=False)
            async with open_swarm(config) as swarm:
                progress = given["progress"]
                found = own if isinstance(own, ModelFolder) else await _from_peers(swarm, str(model), progress, own)
                identified = await identify_model(swarm, found, progress)
                async with open_client(swarm, identified, asked) as opened:
                    opened.state.prefix_salt = given["prefix_salt"].encode()
                    yield opened

    runtime = TrioThread(client())
    try:
        came = runtime.value.model.folder
        local = _local_part(came, given, adapter, head) if local is None else local
    except BaseException:
        runtime.close()
        raise
    return OpenedModel(
        local,
        runtime,
        came.path,
        adapter if isinstance(adapter, Adapter) else None,
        given["wait"],
        given["request_timeout"],
        batch_codec,
    )


def _own_folder(model: str | os.PathLike[str], given: ModelOptions) -> ModelFolder | ModelError:
    """The model on this machine or of the hub; or why it cannot be had there, where peers may have it.

    Raises:
        ModelError: there is no such model, and peers cannot have it.
    """
    try:
        return resolve(
            model,
            need="client",
            progress=given["progress"],
            revision=given["revision"],
            before_download=check_download,
        )
    except ModelError as error:
        if given["revision"] is not None or not may_be_remote(str(model)):
            raise
        return error


async def _from_peers(swarm: Swarm, model: str, progress: Progress, why: ModelError) -> ModelFolder:
    """What a client needs of a model that only peers have. Raises as `find_instead` and `RemoteModel.fetch`."""
    remote = await find_instead(swarm, model, progress, why)
    return await remote.fetch("client", progress)


def _local_part(folder: ModelFolder, given: ModelOptions, adapter: Adapter | str | None, head: bool) -> ClientModel:
    device = "cpu" if given["device"] is None else str(given["device"])
    local = load_client(folder.path, device=device, dtype=str(given["dtype"]).removeprefix("torch."))
    if isinstance(adapter, Adapter):
        fit_adapter(adapter, local, head=head)
    return local


def _peers(initial_peers: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(initial_peers, str):
        raise BadInput("initial_peers takes a list of multiaddrs, not one string")
    peers = os.environ.get("PETALNODE_PEERS", "").split(",") if initial_peers is None else initial_peers
    given = tuple(peer for peer in peers if peer.strip())
    if not given:
        raise BadInput("which swarm? Give initial_peers=[...] or set PETALNODE_PEERS")
    return given


def _trusted(given: ModelOptions) -> TrustedServers:
    if isinstance(given["trusted_servers"], str):
        raise BadInput("trusted_servers takes a list of peer ids, not one string")
    peers = list(given["trusted_servers"] or ())
    for peer in peers:
        try:
            peer_id_to_bytes(peer)
        except ValueError:
            raise BadInput(f"trusted_servers: {peer!r} is no peer id; they begin with 12D3KooW") from None
    return trusted_servers(
        peers,
        given["trusted_blocks"],
        allowed=given["allowed_servers"] or (),
        blocked=given["blocked_servers"] or (),
    )


def _identity(file: str | os.PathLike[str] | None, stack: ExitStack) -> Identity:
    """The identity in this file, which is created if missing and locked until `stack` is closed; else a new one."""
    if file is None:
        return Identity.generate()
    try:
        return stack.enter_context(held_identity(Path(file), "client", Path(file).parent))
    except IdentityLocked as error:
        raise MachineError(str(error)) from error
    except IdentityError as error:
        raise BadInput(str(error)) from error
