"""The Python API: a causal language model whose blocks run in the swarm, used like one of transformers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ...crypto.identity import Identity
from ...protocols.ids import Span
from ..blocks.client import ClientModel, load_client
from ..blocks.remote import RemoteCache, RemoteCall
from ..errors import BadInput
from ..models import Progress, resolve
from ..models.progress import no_progress
from ..swarm.swarm import SwarmConfig, open_swarm
from .core import SwarmClient, identify_model, open_client
from .inference_session import InferenceSession
from .remote import RemoteSequential
from .runtime import TrioThread

DEFAULT_GENERATED_LENGTH = 20
"""What transformers generates when nobody says how much."""


class AutoDistributedModelForCausalLM:
    """Opens models of a swarm; see `from_pretrained`."""

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        initial_peers: Sequence[str] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        allowed_servers: Collection[str] | None = None,
        blocked_servers: Collection[str] | None = None,
        request_timeout: float | None = None,
        wait: bool = False,
        progress: Progress = no_progress,
    ) -> DistributedModelForCausalLM:
        """Loads embeddings, final norm and head of `model`, and finds the servers that hold its blocks.

        Args:
            model: a folder in Hugging Face layout, a .gguf file, a hub id or an alias such as "smollm2".
            initial_peers: multiaddrs of nodes to join through; by default PETALNODE_PEERS, comma-separated.
            dtype: of the local part and of what travels; "auto" is the checkpoint's.
            device: of the local part; None is the CPU.
            allowed_servers, blocked_servers: peer ids to use only, or never.
            request_timeout: seconds that a server may take for one step.
            wait: while no chain of servers covers the model, wait for one instead of raising.

        Raises:
            ModelError: the model cannot be found or used.
            BadInput: an argument that makes no sense, such as a peer address with a typo.
            SwarmError: no peer answers.
        """
        peers = initial_peers
        if peers is None:
            peers = [each for each in os.environ.get("PETALNODE_PEERS", "").split(",") if each.strip()]
        if isinstance(peers, str):
            raise BadInput("initial_peers takes a list of multiaddrs, not one string")
        if not peers:
            raise BadInput("which swarm? Give initial_peers=[...] or set PETALNODE_PEERS")
        folder = resolve(model, need="client", progress=progress, revision=revision)
        dtype_text = str(dtype).removeprefix("torch.")
        local = load_client(folder.path, device="cpu" if device is None else str(device), dtype=dtype_text)
        config = SwarmConfig(identity=Identity.generate(), listen=(), peers=tuple(peers), serve_dht=False)

        @asynccontextmanager
        async def resource() -> AsyncIterator[SwarmClient]:
            async with open_swarm(config) as swarm:
                identified = await identify_model(swarm, folder, progress)
                async with open_client(
                    swarm, identified, allowed=allowed_servers or (), blocked=blocked_servers or ()
                ) as client:
                    yield client

        runtime = TrioThread(resource)
        return DistributedModelForCausalLM(
            local, runtime, folder.num_blocks, wait=wait, request_timeout=request_timeout, path=folder.path
        )


class DistributedModelForCausalLM:
    """A causal language model with its blocks in the swarm.

    `generate`, calling it, `config` and everything else behave as in transformers: what this class does not define
    is the local transformers model's (`transformers_model`), which holds embeddings, final norm and head. A context
    manager; a process that forgets to close it exits cleanly all the same.
    """

    def __init__(
        self,
        local: ClientModel,
        runtime: TrioThread[SwarmClient],
        num_blocks: int,
        *,
        wait: bool,
        request_timeout: float | None,
        path: Path,
    ) -> None:
        self.transformers_model = local.model
        self.remote_blocks = RemoteSequential(runtime, Span(0, num_blocks), wait=wait, step_timeout=request_timeout)
        self.path = path
        self._local = local
        self._runtime = runtime
        self._wait = wait
        self._request_timeout = request_timeout
        self._active: list[InferenceSession] = []
        local.bind(self._run_blocks)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "transformers_model" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.transformers_model, name)

    def __enter__(self) -> DistributedModelForCausalLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all sessions and leaves the swarm. Safe to call twice."""
        self._runtime.close()

    def inference_session(self, max_length: int) -> InferenceSession:
        """A session for up to `max_length` tokens a row. Within `with`, `generate` uses it by itself."""
        session = InferenceSession(
            self._runtime,
            self.remote_blocks.span,
            max_length,
            wait=self._wait,
            step_timeout=self._request_timeout,
            on_exit=self._deactivate,
        )
        self._active.append(session)
        return session

    @property
    def active_session(self) -> InferenceSession | None:
        """The innermost open session, which `generate` uses."""
        return self._active[-1] if self._active else None

    def _deactivate(self, session: InferenceSession) -> None:
        if session in self._active:
            self._active.remove(session)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' forward, without a cache unless `past_key_values` or `use_cache=True` is given."""
        if kwargs.get("past_key_values") is None:
            kwargs.setdefault("use_cache", False)
        return self.transformers_model(*args, **kwargs)

    @torch.no_grad()
    def generate(
        self, inputs: torch.Tensor | None = None, *, session: InferenceSession | None = None, **kwargs: Any
    ) -> Any:
        """transformers' generate: greedy, sampling, beam search, left-padded batches.

        Args:
            inputs: token ids [batch, tokens]; also as `input_ids`.
            session: keeps the caches from call to call; by default the active session, else one for this call.
                Give the whole sequence: what the session holds of it already is not sent again, and what differs
                is rolled back.
        """
        input_ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        if input_ids is None or input_ids.dim() != 2 or not input_ids.numel():
            raise BadInput("generate needs input_ids of shape [batch, tokens], with at least one token")
        session = session or self.active_session
        if session is None:
            length = self._total_length(input_ids.shape[1], kwargs)
            with InferenceSession(
                self._runtime,
                self.remote_blocks.span,
                length,
                wait=self._wait,
                step_timeout=self._request_timeout,
            ) as own:
                return self._generate_in(own, input_ids, kwargs)
        return self._generate_in(session, input_ids, kwargs)

    def _generate_in(self, session: InferenceSession, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        tokens = input_ids.tolist()
        # The last token is always sent: its output is what the next one is chosen from.
        session.position = min(_shared(session.tokens, tokens), input_ids.shape[1] - 1)
        session.tokens = None
        cache = RemoteCache(session)
        cache.advance(session.position)
        result = self.transformers_model.generate(input_ids, past_key_values=cache, use_cache=True, **kwargs)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        beams = kwargs.get("num_beams") or self.transformers_model.generation_config.num_beams or 1
        if beams == 1 and sequences.shape[0] == session.batch_size:
            session.tokens = sequences[:, : session.position].tolist()
        return result

    def _total_length(self, prompt: int, kwargs: dict[str, Any]) -> int:
        config = kwargs.get("generation_config") or self.transformers_model.generation_config
        new = kwargs.get("max_new_tokens") or (
            None if kwargs.get("max_length") else getattr(config, "max_new_tokens", None)
        )
        if new:
            return prompt + int(new)
        total = kwargs.get("max_length") or getattr(config, "max_length", None)
        return max(int(total) if total else prompt + DEFAULT_GENERATED_LENGTH, prompt + 1)

    def _run_blocks(self, hidden: torch.Tensor, call: RemoteCall) -> torch.Tensor:
        """What stands in the local model instead of its blocks."""
        padding = call.left_padding or ()
        if padding and max(padding) >= call.position + hidden.shape[1]:
            raise BadInput("a row of the attention mask hides all of its tokens")
        if call.cache is None:
            with self.remote_blocks.inference_session(hidden.shape[1]) as session:
                return session.step(hidden, left_padding=padding)
        session = call.cache.session
        if not isinstance(session, InferenceSession):
            raise BadInput("a cache belongs to a session here: use generate(), or inference_session() and its step()")
        if session.position > call.position:
            session.position = call.position
        return session.step(hidden, reorder=call.cache.take_reorder() or (), left_padding=padding)


def _shared(held: list[list[int]] | None, wanted: list[list[int]]) -> int:
    """How many leading tokens all rows have in common with what is held."""
    if held is None or len(held) != len(wanted):
        return 0
    shared = min(len(held[0]), len(wanted[0]))
    for left, right in zip(held, wanted, strict=True):
        for index in range(shared):
            if left[index] != right[index]:
                shared = index
                break
    return shared
