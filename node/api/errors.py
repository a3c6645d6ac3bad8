"""Errors as OpenAI's clients understand them: a status, a type, a code, a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

from starlette.responses import JSONResponse
from starlette.types import Scope

from ..errors import BadInput, NoChainError, PetalnodeError, SwarmError

RETRY_SECONDS: Final = 10
"""After which a client may ask again where the swarm cannot serve: servers announce themselves every 15 s."""

MESSAGES_PATH: Final = "/v1/messages"
"""Under which errors have the shape of Anthropic's."""

REQUEST_ID: Final[ContextVar[str]] = ContextVar("REQUEST_ID", default="a request of a batch")
"""Of the request that a task and those that it starts work on."""

_ANTHROPIC_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """What a request is refused with.

    Attributes:
        status: of HTTP.
        param: the field of the request that is meant; None if it is not one.
        code: for programs.
        headers: of the response, beside the usual ones.
        more: fields of the error beside OpenAI's.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.more = more

    @property
    def kind(self) -> str:
        """OpenAI's type of the error."""
        by_status = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        if self.status >= 500:
            return "server_error"
        return by_status.get(self.status, "invalid_request_error")

    def fields(self) -> dict[str, Any]:
        """The JSON object."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code, **self.more}
        return {"error": error}


def error_response(error: ApiError, scope: Scope) -> JSONResponse:
    """The response that tells the client of a request (its ASGI scope) of `error`."""
    request_id = scope.get("state", {}).get("request_id")
    return JSONResponse(error_object(error, scope["path"], request_id), error.status, error.headers)


def error_object(error: ApiError, path: str, request_id: str | None = None) -> dict[str, Any]:
    """The JSON object of an error, as clients of the interface at `path` understand it.

    Args:
        request_id: of the request, where the interface tells it (Anthropic's).
    """
    if path.startswith(MESSAGES_PATH):
        kind = _ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        told = {"type": kind, "message": str(error), **error.more}
        return {"type": "error", "error": told, "request_id": request_id}
    return {"error": str(error)} if path.startswith("/api/") else error.fields()


def api_error(error: Exception) -> ApiError:
    """What a client is told of an error. Of a fault of the program it is told nothing but that."""
    match error:
        case ApiError():
            return error
        case NoChainError():
            return ApiError(
                503,
                str(error),
                code="model_unavailable",
                headers={"Retry-After": str(RETRY_SECONDS)},
                missing_blocks=list(error.missing),
            )
        case SwarmError():
            return ApiError(503, str(error), code="swarm_error", headers={"Retry-After": str(RETRY_SECONDS)})
        case BadInput():
            return ApiError(400, str(error), code="invalid_value")
        case PetalnodeError():
            return ApiError(500, str(error), code="machine_error")
    return ApiError(500, "the server has failed in a way that nobody expected; its log says how", code="internal_error")
