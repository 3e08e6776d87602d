"""Error responses in the shape of the OpenAI protocol."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

#: Machine-readable codes of some statuses, as OpenAI has them.
_CODES = {401: "invalid_api_key"}


def error_object(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """The body of an error; ``param``: the field of the request that is wrong."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = "model_not_found" if param == "model" else _CODES.get(status)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(message: str, status: int, param: str | None = None) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(error_object(message, status, param), status, headers)
