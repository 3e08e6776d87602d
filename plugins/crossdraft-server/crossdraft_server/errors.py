"""Error responses in the format of the OpenAI API."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

#: OpenAI's error codes by HTTP status.
_CODES = {401: "invalid_api_key"}


def error_object(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """The JSON body of an error; ``param``: the invalid field of the request."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = "model_not_found" if param == "model" else _CODES.get(status)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(message: str, status: int, param: str | None = None) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(error_object(message, status, param), status, headers)
