"""Errors as OpenAI's clients understand them: a status, a type, a code, a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import BadInput, NoChainError, PetalnodeError, SwarmError

RETRY_SECONDS: Final = 10
"""After which a client may ask again where the swarm cannot serve: servers announce themselves every 15 s."""

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


def error_object(error: ApiError, path: str) -> dict[str, Any]:
    """The JSON object of an error, as clients of the interface at `path` understand it."""
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error), **error.more}}
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
