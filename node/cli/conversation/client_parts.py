"""What a client has of a model, loaded beside other things."""

from __future__ import annotations

from typing import Any

import trio

from ...client.chat import Text
from ...errors import ModelError
from ...models import ModelFolder, resolve
from ...swarm.swarm import Swarm
from ...weights.remote_model import may_be_remote
from ..model_choice import folder_from_peers, model_folder
from ..output import Output


class ClientParts:
    """What a client has of a model: its folder, embeddings and head, tokenizer and adapter, and another model that
    guesses tokens for it; loaded beside other things.

    Args:
        adapter: a folder with an adapter, or the name of one that servers hold.
        draft: the model that guesses.

    Attributes:
        draft_model: the same, as soon as all is loaded.
    """

    def __init__(self, adapter: str | None, draft: str | None = None) -> None:
        self.draft_model: Any = None
        self._adapter = adapter
        self._draft = draft
        self._draft_folder: ModelFolder | None = None
        self._folders: list[ModelFolder] = []
        self._loaded: list[Any] = []
        self._swarms: list[Swarm] = []
        self._found, self._done, self._joined = trio.Event(), trio.Event(), trio.Event()

    def join(self, swarm: Swarm) -> None:
        """What is not on this machine may come from peers of this swarm."""
        self._swarms.append(swarm)
        self._joined.set()

    async def _swarm_joined(self) -> Swarm:
        await self._joined.wait()
        return self._swarms[0]

    async def find_and_load(self, model: str, output: Output) -> None:
        """
        Raises:
            ModelError, MachineError, BadInput: the model or the adapter cannot be had or used.
        """
        try:
            folder = await model_folder(model, output, need="client")
        except ModelError as error:
            if not may_be_remote(model):
                raise
            folder = await folder_from_peers(await self._swarm_joined(), model, output, "client", error)
        if self._draft is not None:
            self._draft_folder = await model_folder(self._draft, output, need="all")
        await self.load(folder)

    async def load(self, folder: ModelFolder) -> None:
        """Loads what is in `folder`. Raises ModelError, BadInput."""
        self._folders.append(folder)
        self._found.set()
        await trio.to_thread.run_sync(self._load, folder, abandon_on_cancel=True)
        self._done.set()

    def _load(self, folder: ModelFolder) -> None:
        from ...blocks import collector_paused

        with collector_paused():
            from ...blocks.client_part import load_client
            from ...client.session_adapter import choose_adapter, fit_adapter
            from ...models.adapter import Adapter

        adapter = choose_adapter(self._adapter) if self._adapter is not None else None
        client_part = load_client(folder.path)
        if isinstance(adapter, Adapter):
            fit_adapter(adapter, client_part)
        text = Text(folder)
        if self._draft is not None:
            from ...client.generation.draft_model import load_draft_model

            self.draft_model = load_draft_model(self._draft_folder or resolve(self._draft), text)
        self._loaded.extend((client_part, text, adapter))

    async def folder(self) -> ModelFolder:
        """As soon as it is found."""
        await self._found.wait()
        return self._folders[0]

    async def loaded(self) -> tuple[Any, Text, Any]:
        """(the client's part, tokenizer, adapter), as soon as they are loaded."""
        await self._done.wait()
        client_part, text, adapter = self._loaded
        return client_part, text, adapter


async def import_generation() -> None:
    """In a worker thread: torch and transformers, and what chooses tokens."""
    await trio.to_thread.run_sync(_import_generation, abandon_on_cancel=True)


def _import_generation() -> None:
    from ...blocks import collector_paused

    with collector_paused():
        from ...client import generation  # noqa: F401
