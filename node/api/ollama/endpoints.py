"""Where Ollama's endpoints are: chats, texts, and the models that there are."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ...version import __version__
from ..engine.core import Core
from ..engine.generation import ServedModel
from ..engine.preparing import PreparedChat, prepare_chat, prepare_completion
from ..engine.requests import ChatRequest
from ..engine.tools import tool_form
from ..fields import Fields
from ..http.answers import Answers
from ..http.bodies import read_asked
from .requests import model_name, parse_chat, parse_generate
from .writer import LineWriter, timestamp


def ollama_routes(core: Core) -> list[BaseRoute]:
    """The routes below /api."""
    endpoints = _Endpoints(core)
    return [
        Route("/api/version", endpoints.version, methods=["GET"]),
        Route("/api/tags", endpoints.tags, methods=["GET"]),
        Route("/api/show", endpoints.show, methods=["POST"]),
        Route("/api/chat", endpoints.chat, methods=["POST"]),
        Route("/api/generate", endpoints.generate, methods=["POST"]),
    ]


class _Endpoints:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._since = timestamp()

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def tags(self, request: Request) -> Response:
        return JSONResponse({"models": [self._listed(model) for model in self._core.models.values()]})

    async def show(self, request: Request) -> Response:
        core = self._core
        model = core.model(model_name(await self._fields(request)))
        config = core.client.model.folder.config
        family = self._family
        capabilities = ["completion", *(["tools"] if tool_form(core.text.template) is not None else [])]
        return JSONResponse(
            {
                "template": core.text.template,
                "details": self._details(),
                "model_info": {
                    "general.architecture": family,
                    f"{family}.block_count": core.client.model.num_blocks,
                    f"{family}.context_length": core.context(model),
                    f"{family}.embedding_length": config.get("hidden_size"),
                },
                "capabilities": capabilities,
                "modified_at": self._since,
            }
        )

    async def chat(self, request: Request) -> Response:
        fields, asked = await read_asked(request, self._core, lambda fields: (fields, parse_chat(fields)))
        if asked is None:
            return self._loaded(fields, {"message": {"role": "assistant", "content": ""}})
        prepared = await prepare_chat(self._core, request.state.owner, asked)
        return self._answers(asked, prepared, is_chat=True)

    async def generate(self, request: Request) -> Response:
        fields, asked = await read_asked(request, self._core, lambda fields: (fields, parse_generate(fields)))
        if asked is None:
            return self._loaded(fields, {"response": ""})
        owner = request.state.owner
        if isinstance(asked, ChatRequest):
            prepared = await prepare_chat(self._core, owner, asked)
        else:
            prepared = PreparedChat(await prepare_completion(self._core, owner, asked))
        return self._answers(asked, prepared, is_chat=False)

    def _answers(self, asked: Any, prepared: PreparedChat, *, is_chat: bool) -> Response:
        writer = LineWriter(asked.text, prepared, self._core.text.token_text, is_chat=is_chat)
        return Answers(self._core, prepared.generation, writer)

    def _loaded(self, fields: Fields, empty: dict[str, Any]) -> Response:
        """To a request without a prompt, by which programs have a model loaded."""
        model = self._core.model(model_name(fields))
        line = {"model": model.name, "created_at": timestamp(), "done": True, "done_reason": "load", **empty}
        return JSONResponse(line)

    async def _fields(self, request: Request) -> Fields:
        return await read_asked(request, self._core, lambda fields: fields)

    @property
    def _family(self) -> str:
        return str(self._core.client.model.folder.config.get("model_type", "unknown"))

    def _details(self) -> dict[str, Any]:
        family = self._family
        return {"parent_model": "", "format": "safetensors", "family": family, "families": [family]}

    def _listed(self, model: ServedModel) -> dict[str, Any]:
        return {
            "name": model.name,
            "model": model.name,
            "modified_at": self._since,
            "digest": self._core.client.model.version.hex(),
            "size": 0,
            "details": self._details(),
        }
