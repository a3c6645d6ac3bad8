"""A transformers model whose blocks run in the swarm: how it is opened, and what all kinds of it share."""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, ParamSpec, Self, TypedDict, TypeVar, get_type_hints

import torch
from torch import nn

from ....crypto.identity import Identity, IdentityError, IdentityLocked, held_identity, peer_id_to_bytes
from ....crypto.swarm_key import SwarmKeyError, find_swarm_key
from ....protocols.ids import Span
from ....protocols.training import LoraName
from ...blocks.architecture import check_download
from ...blocks.client_part import ClientModel, load_client
from ...blocks.remote_cache import RemoteCache, RemoteCall
from ...errors import BadInput, MachineError
from ...links.target import read_target
from ...models import Progress, resolve
from ...models.adapter import Adapter
from ...models.progress import no_progress
from ...network.addresses import parse_peer
from ...swarm.config import SwarmConfig
from ...swarm.swarm import open_swarm
from ...swarm.trusted_servers import TrustedServers, trusted_servers
from ..core import CODEC_OF, ClientOptions, SwarmClient, open_client, parse_codec
from ..session.comparing import Disagreement
from ..session_adapter import choose_adapter, fit_adapter
from ..swarm_model import identify_model
from .arguments import forward_arguments
from .remote import RemoteSequential, forward_context, within
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
        trusted_servers: peer ids of the only servers that compute the first and the last `trusted_blocks` blocks (2),
            from which a server can tell the text; others compute the rest. None lets all servers compute all blocks.
        trusted_blocks: how many blocks at each end are for trusted servers only.
        share_receipts: multiaddrs with /p2p of auditors that are sent receipts and hidden states, which show them the
            text.
        require_pledge: use only servers that pledge at least this many points.
        compare_chains: from 2 on, sessions (and `generate`) run every step on this many chains that share no server,
            and compare their outputs; see `disagreements`. Calls without a cache are not compared.
        request_timeout: seconds that a server may take for one step.
        codec: how the hidden states of sessions (and `generate`) travel: "none" as they are, "float16", "bfloat16" or
            "int8"; "auto" takes one from the second session on, where that saves a tenth of the time by the bandwidth
            that was measured and rounds by at most 0.1 %.
        batch_codec: the same for calls without a cache and their gradients, without "auto".
        prefix_salt: a secret of at least 16 characters: servers with `--prefix-cache salted` let all who know it use
            what they have computed for one of them, and tell by the time that they take which texts these have sent.
        wait: while no chain of servers covers the model, wait for one instead of raising.
        adapter: a folder with a LoRA adapter or a prompt in peft's format, which is sent to servers that do not hold
            it; or the name of a LoRA adapter that servers hold: then only those servers are used.
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
    folder = resolve(
        model,
        need="client",
        progress=given["progress"],
        revision=given["revision"],
        before_download=check_download,
    )
    device = "cpu" if given["device"] is None else str(given["device"])
    local = load_client(folder.path, device=device, dtype=str(given["dtype"]).removeprefix("torch."))
    if isinstance(adapter, Adapter):
        fit_adapter(adapter, local, head=head)

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
                identified = await identify_model(swarm, folder, given["progress"])
                async with open_client(swarm, identified, asked) as opened:
                    opened.prefix_salt = given["prefix_salt"].encode()
                    yield opened

    return OpenedModel(
        local,
        TrioThread(client),
        folder.path,
        adapter if isinstance(adapter, Adapter) else None,
        given["wait"],
        given["request_timeout"],
        batch_codec,
    )


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


class DistributedModel:
    """A transformers model with its blocks in the swarm: what all kinds of it share.

    Attributes that this class does not define (`config`, `parameters`, ...) are those of the local transformers model,
    `transformers_model`, which holds everything but the blocks. Gradients pass through the swarm; no parameter has
    `requires_grad` at first, so set it on what you train. The servers' blocks never change and have no dropout.
    A context manager: leaving it closes the model. A process that does not close it exits cleanly all the same.

    Attributes:
        remote_blocks: all blocks. May be set to another module that takes and returns hidden states [batch, tokens,
            hidden], such as `nn.Sequential(blocks[:10], MyAdapter(), blocks[10:])`, whose parameters then belong to
            the model.
        num_blocks, hidden_size: of the whole model.
        version: the model version, 32 bytes.
        any_token: a token id that is not that of padding.
        linears: per block, (input size, output size) of its linear layers, by their paths in the block.
        blocks_path: the name of the list of blocks in the transformers model.
        labels_are_tokens: whether `labels` has the shape of `input_ids`.
        soft_prompt: the `PromptTuning` of the adapter that the model was opened with, or None; calls go through it.
    """

    labels_are_tokens = False

    def __init__(self, opened: OpenedModel, transformers_model: Any) -> None:
        local = opened.local
        self.transformers_model = transformers_model
        self.path = opened.path
        self.num_blocks = local.num_blocks
        self.hidden_size = local.hidden_size
        self.any_token = local.any_token
        self.linears = local.linears
        self.blocks_path = local.blocks_path
        self.soft_prompt: Any = None
        self.version = opened.runtime.value.model.version
        self._local = local
        self._runtime = opened.runtime
        self._blocks = RemoteSequential(
            opened.runtime,
            Span(0, local.num_blocks),
            wait=opened.wait,
            step_timeout=opened.request_timeout,
            codec=CODEC_OF[opened.batch_codec],
        )
        self._local.layer.inner = self._blocks
        self._local.bind(self._run_blocks)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "transformers_model" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.transformers_model, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all sessions and leaves the swarm. Safe to call twice."""
        self._runtime.close()

    @property
    def disagreements(self) -> tuple[Disagreement, ...]:
        """Differences found so far between chains that were compared (`compare_chains`)."""
        return tuple(self._runtime.value.disagreements)

    @property
    def remote_blocks(self) -> Any:
        return self._local.layer.inner

    @remote_blocks.setter
    def remote_blocks(self, blocks: nn.Module) -> None:
        self._local.layer.inner = blocks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' forward, without a cache unless `past_key_values` or `use_cache=True` is given.

        Batches may be padded at either side. With `output_hidden_states=True` the blocks run one by one, and gradients
        pass through the hidden states that are returned.

        Raises:
            TypeError: an argument that the model does not have.
            BadInput: one that the servers' blocks would not get, such as `output_attentions`; or
                `output_hidden_states` together with a cache, or with other modules in place of the blocks.
            SwarmError: no chain covers the blocks, or several servers failed.
        """
        given = forward_arguments(self.transformers_model.forward, args, kwargs)
        if self.soft_prompt is not None and not self._local.is_prompted:
            return self.soft_prompt(*args, **kwargs)
        if given.get("past_key_values") is None and given.get("use_cache") is None:
            given["use_cache"] = False
            if self.config.use_cache and given.get("position_ids") is not None and given.get("attention_mask") is None:
                # transformers would make a cache, and so take each row for one text, wherever its positions begin anew.
                given["attention_mask"] = torch.ones_like(given["position_ids"])
        wanted = given.get("output_hidden_states")
        if self.config.output_hidden_states if wanted is None else wanted:
            return self._forward_with_states(**given | {"output_hidden_states": False})
        return self.transformers_model(**given)

    def _forward_with_states(self, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None or kwargs["use_cache"]:
            raise BadInput(
                "a session does not return the hidden states between blocks: call the model with use_cache=False"
            )
        if self.remote_blocks is not self._blocks:
            raise BadInput("remote_blocks was replaced: record the hidden states in your own module")
        entered: list[torch.Tensor] = []
        with within(replace(forward_context(), block_inputs=entered)), self._local.last_hidden_state() as last:
            output = self.transformers_model(**kwargs)
        states = (*entered, *last)
        if isinstance(output, tuple):
            return *output, states
        output.hidden_states = states
        return output

    @contextmanager
    def prompted(
        self, prompts: torch.Tensor, deep: torch.Tensor | None = None, *, starts: torch.Tensor | None = None
    ) -> Iterator[None]:
        """A context in which soft prompts replace the embeddings of some tokens of every row, for calls of this thread.

        Args:
            prompts: [prefix, embedding size], in place of the embeddings of the first `prefix` tokens.
            deep: [blocks, prefix, hidden], added to the input of each block at the first `prefix` positions.
            starts: [rows], where the prompts begin in each row; None is at its first token.
        """
        context = replace(forward_context(), prompts=None if deep is None else deep.unsqueeze(1))
        with self._local.prompted(prompts, starts), within(context):
            yield

    def changed(self, lora: Mapping[LoraName, torch.Tensor]) -> AbstractContextManager[None]:
        """A context in which these LoRA weights change layers of the servers' blocks, for calls of this thread."""
        return within(replace(forward_context(), lora=lora))

    def _run_blocks(self, hidden: torch.Tensor, call: RemoteCall) -> torch.Tensor:
        """Called by the local model in place of its blocks: hidden [batch, tokens, hidden] to the same shape."""
        if call.cache is not None:
            return self._run_in_session(hidden, call, call.cache)
        self._check_factors(call.position_ids)
        context = replace(forward_context(), mask=call.attention_mask, positions=call.position_ids)
        with within(context):
            if context.block_inputs is None:
                output: torch.Tensor = self.remote_blocks(hidden)
                return output
            for block in self._blocks:
                context.block_inputs.append(hidden)
                hidden = block(hidden)
            return hidden

    def _check_factors(self, positions: torch.Tensor | None) -> None:
        """
        Raises:
            BadInput: some rows are long (longrope), by which all would be, and others not. They may travel apart.
        """
        original = self._local.original_length
        if original is None or positions is None or positions.dim() != 2:
            return
        lengths = positions.amax(dim=1) + 1
        if int(lengths.max()) > original >= int(lengths.min()):
            raise BadInput(
                f"some rows are longer than the {original} tokens from which on this model's positions mean something "
                "else, and some are not: call it with the rows one by one"
            )

    def _run_in_session(self, hidden: torch.Tensor, call: RemoteCall, cache: RemoteCache) -> torch.Tensor:
        raise BadInput("this model has no cache: call it with use_cache=False")
