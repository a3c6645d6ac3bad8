"""Servers that grant less than those of today: what they say is changed on its way to the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from petalnode.node.testing import MemoryNode
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import MessageStream
from petalnode.protocols.ids import INFERENCE

Stream = MessageStream[wire.InferenceFrame]


class Grants:
    """What servers prepared by this say in `Granted`, as long as it stands in `said`; None: nothing of it."""

    def __init__(self, **said: Any) -> None:
        self.said = said

    def prepare(self, node: MemoryNode) -> None:
        """For `MemorySwarm.start`."""
        honest = node.set_handler

        def set_handler(protocol: str, frame_type: Any, handler: Any, **options: Any) -> None:
            async def handle(stream: Stream) -> None:
                await handler(_Granting(stream, self))

            honest(protocol, frame_type, handle if protocol == INFERENCE else handler, **options)

        node.set_handler = set_handler  # type: ignore[method-assign]


class _Granting:
    def __init__(self, stream: Stream, grants: Grants) -> None:
        self._stream, self._grants = stream, grants

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, frame: wire.InferenceFrame, payloads: Sequence[Any] = (), *, timeout: float) -> None:
        if frame.WhichOneof("body") == "granted":
            for name, value in self._grants.said.items():
                frame.granted.ClearField(name)  # type: ignore[arg-type]
                if value is not None:
                    setattr(frame.granted, name, value)
        await self._stream.send(frame, payloads, timeout=timeout)
