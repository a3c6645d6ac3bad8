"""Servers that know less than those of today: what they hear and say is changed between them and the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from petalnode.node.testing import MemoryNode
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import INFERENCE, PUSH
from tests.swarm.watched_streams import watch_served


class Older:
    """What servers prepared by this say in `Granted`, as long as it stands in `said`; None: nothing of it. They do not
    read fields of steps that stand in `unknown`."""

    def __init__(self, **said: Any) -> None:
        self.said = said
        self.unknown: set[str] = set()

    @contextmanager
    def without(self, field: str) -> Iterator[None]:
        """Within it they do not read this field of steps."""
        self.unknown.add(field)
        try:
            yield
        finally:
            self.unknown.discard(field)

    def prepare(self, node: MemoryNode) -> None:
        """For `MemorySwarm.start`."""
        watch_served(node, INFERENCE, sent=self._say, received=self._hear)
        watch_served(node, PUSH, received=self._hear)

    def _say(self, stream: Any, frame: wire.InferenceFrame, payloads: Any) -> None:
        if frame.WhichOneof("body") == "granted":
            for name, value in self.said.items():
                frame.granted.ClearField(name)  # type: ignore[arg-type]
                if value is not None:
                    setattr(frame.granted, name, value)

    def _hear(self, stream: Any, frame: Any, payloads: Any) -> None:
        body = frame.WhichOneof("body")
        step = frame.step if body == "step" else frame.push.step if body == "push" else None
        for name in self.unknown if step is not None else ():
            step.ClearField(name)
