"""The routes of `petalnode api`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..errors import PetalnodeError
from .anthropic import anthropic_routes
from .batches.endpoints import batch_routes
from .batches.runner import BatchRunner
from .engine.core import Core
from .errors import ApiError, api_error, error_response
from .http.admission import Admission, AdmissionMiddleware
from .ollama import ollama_routes
from .openai.endpoints import ResponseStore, openai_routes, response_routes


def create_app(
    core: Core,
    admission: Admission,
    pages: Sequence[BaseRoute] = (),
    batches: BatchRunner | None = None,
    responses: ResponseStore | None = None,
) -> AdmissionMiddleware:
    """The ASGI application.

    Args:
        pages: routes beside the API, such as `Mount("/", StaticFiles(...))` for a web page. They come after the API's,
            need no key, and are told nothing that does.
        batches: keeps files and batches; its `run` takes what this returns.
        responses: keeps what /v1/responses goes on from; one of the usual size if none is given.
    """
    routes: list[BaseRoute] = [Route("/health", _health, methods=["GET"])]
    routes += [*openai_routes(core), *response_routes(core, responses), *batch_routes(batches)]
    routes += [*anthropic_routes(core), *ollama_routes(core), *pages]
    handlers: Mapping[Any, Any] = {
        ApiError: _error_response,
        PetalnodeError: _error_response,
        HTTPException: _http_error,
        Exception: _error_response,
    }
    return AdmissionMiddleware(Starlette(routes=routes, exception_handlers=dict(handlers)), admission)


async def _health(request: Request) -> Response:
    """Whether this process answers; needs no key, and asks nobody."""
    return JSONResponse({"status": "ok"})


async def _error_response(request: Request, error: Exception) -> Response:
    return error_response(api_error(error), request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = request.url.path
    text = f"there is no {path[:200]} here" if status == 404 else str(getattr(error, "detail", error))
    told = ApiError(status, text, code="unknown_url", headers=getattr(error, "headers", None))
    return error_response(told, request.scope)
