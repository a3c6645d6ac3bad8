"""The client's side of adapters: which servers have one, and bringing it to those that have not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from ...protocols import wire_pb2 as wire
from ...protocols.adapter import AnnouncedAdapter, is_name
from ...protocols.announcement import Announcement
from ...protocols.framing import PeerError
from ...protocols.ids import PROTOCOL_VERSION, Span
from ...protocols.inference import Refusal
from ...protocols.training import BatchFrames, send_pieces
from ..errors import BadInput
from ..swarm.routing import Hop
from .deadlines import DEADLINES
from .request import server_failed, server_refused

if TYPE_CHECKING:
    from ..blocks.client_part import ClientModel
    from ..models.adapter import Adapter

ADAPTER_WAIT: Final = 60.0
"""For a server to have memory for an adapter, or to have checked it."""


@dataclass(frozen=True, eq=False)
class SessionAdapter:
    """What the blocks of a session are changed by.

    Attributes:
        name: for people.
        hash: by which servers know it.
        content: the adapter itself, which is brought to servers that do not hold it; None: only those are used that do.
    """

    name: str
    hash: bytes
    content: Adapter | None = None
    _packed: dict[Span, tuple[wire.Adapter, list[bytes]]] = field(default_factory=dict)

    @classmethod
    def of(cls, adapter: Adapter) -> SessionAdapter:
        return cls(adapter.name, adapter.hash, adapter)

    def is_held_by(self, server: Announcement) -> bool:
        """Whether a server announces it."""
        return any(adapter.hash == self.hash for adapter in announced(server))

    def packed(self, span: Span) -> tuple[wire.Adapter, list[bytes]]:
        """The part for some blocks as it travels, without the model's version; off the trio thread."""
        from ...protocols.tensors import encode

        assert self.content is not None
        if span not in self._packed:
            tensors = self.content.part(span)
            encoded = [encode(tensor, "none") for tensor in tensors.values()]
            offer = wire.Adapter(
                protocol_version=PROTOCOL_VERSION,
                span=wire.Span(start=span.start, end=span.end),
                hash=self.hash,
                blocks=[wire.AdapterBlock(block=block, hash=digest) for block, digest in self.content.blocks],
                names=list(tensors),
                tensors=[header for header, _ in encoded],
            )
            self._packed[span] = offer, [payload for _, payload in encoded]
        return self._packed[span]


def announced(server: Announcement) -> list[AnnouncedAdapter]:
    """The adapters that a server says it holds."""
    return [parsed for text in server.adapters if (parsed := AnnouncedAdapter.parse(text)) is not None]


def choose_adapter(text: str) -> Adapter | str:
    """What a person means: the adapter in a folder, or the name of one that servers hold.

    Raises:
        BadInput: the folder holds none that can be used.
    """
    from ..models.adapter import read_adapter

    return text if is_adapter_name(text) else read_adapter(Path(text))


def fit_adapter(adapter: Adapter, local: ClientModel, *, head: bool = False) -> None:
    """Checks that it is for this model, as far as its part here tells. `head`: whether it may have one of its own.

    Raises:
        BadInput: it was made for another architecture, or changes what petalnode cannot.
    """
    blocks = Span(0, local.num_blocks)
    adapter.check_fits(blocks, dict(enumerate(local.linears)), local.hidden_size, local.num_blocks)
    width = local.model.get_input_embeddings().weight.shape[1]
    if adapter.soft_prompt is not None and adapter.soft_prompt.shape[1] != width:
        raise BadInput(
            f"the adapter {adapter.name} is not for this model: its prompt has {adapter.soft_prompt.shape[1]} values a "
            f"token, and the embeddings have {width}"
        )
    if adapter.local and not head:
        raise BadInput(
            f"the adapter {adapter.name} has a head of its own ({', '.join(adapter.local)}), as classifiers do"
        )


def is_adapter_name(text: str) -> bool:
    """Whether a person means an adapter that servers hold, by its name, and not a folder."""
    name, _, digits = text.partition("@")
    return not Path(text).exists() and is_name(name) and all(digit in "0123456789abcdef" for digit in digits)


def named(text: str, servers: Collection[Announcement]) -> SessionAdapter | None:
    """The adapter that these servers announce by this name; "name@1f2e" says which of several. None if there is none.

    Raises:
        BadInput: there are several.
    """
    name, _, digits = text.partition("@")
    found = {
        adapter.hash: adapter
        for server in servers
        for adapter in announced(server)
        if adapter.name == name and adapter.hash.hex().startswith(digits)
    }
    if len(found) > 1:
        which = " or ".join(sorted(f"{name}@{digest.hex()[:8]}" for digest in found))
        raise BadInput(f"the swarm holds several adapters that are called {text}: say {which}")
    return next((SessionAdapter(name, adapter.hash) for adapter in found.values()), None)


async def bring(stream: BatchFrames, adapter: SessionAdapter, hop: Hop, model_version: bytes) -> None:
    """Has the server of `hop` hold the adapter for sessions of this client, at least while `stream` is open.

    Raises:
        ServerRefused: the server will not, and says why.
        ServerFailed: it does not answer, or answers nonsense.
    """
    offer, payloads = await trio.to_thread.run_sync(adapter.packed, hop.span)
    message = wire.Adapter()
    message.CopyFrom(offer)
    message.model_version = model_version
    try:
        await stream.send(wire.BatchFrame(adapter=message), timeout=DEADLINES.send)
        if not await _is_held(stream, hop):
            await send_pieces(stream, payloads, timeout=DEADLINES.send)
            if not await _is_held(stream, hop):
                raise server_failed(hop, "it asked for the same adapter twice")
    except PeerError as error:
        raise server_failed(hop, str(error)) from error


async def _is_held(stream: BatchFrames, hop: Hop) -> bool:
    frame, _ = await stream.receive(timeout=ADAPTER_WAIT)
    body = frame.WhichOneof("body")
    if body == "error":
        raise server_refused(hop, Refusal.from_wire(frame.error), " the adapter")
    if body != "adapter_state":
        raise server_failed(hop, f"it answered an adapter with {body}")
    return bool(frame.adapter_state.held)
