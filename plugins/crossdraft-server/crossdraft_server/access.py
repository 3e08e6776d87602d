"""Access control: checks of Host, Origin, API key and media type, made before a body is read.

A web page in this user's browser can send requests to the server. A page of another site sends its Origin header, and
without a preflight it can only post media types other than ``application/json``. For the Host header, see
`util.loopback`.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from crossdraft import quoted
from crossdraft.commands import is_loopback_header

from .errors import error_response

#: Paths that need no API key: they return counts only.
_PUBLIC_PATHS = frozenset({"/health"})


class AccessControl:
    """ASGI middleware that rejects requests of other sites and, if an API key is set, requests without it.

    Args:
        app: the application.
        loopback: True if the server listens on the loopback interface only, so that Host must be a loopback name.
        api_key: the expected bearer token of the ``Authorization`` header; None = no key is required.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool, api_key: str | None):
        self._app, self._loopback, self._api_key = app, loopback, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._check(Headers(scope=scope), scope["path"], scope["method"])):
            message, status = error
            response = error_response(message, status)
            response.headers["connection"] = "close"  # the body is not read
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, headers: Headers, path: str, method: str) -> tuple[str, int] | None:
        """The message and status of the first failed check, or None."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._loopback and not is_loopback_header(host):
            return (
                f"Host {quoted(host)} is not this machine: the server listens on the loopback interface, so the host "
                "must be localhost, 127.0.0.1 or [::1]",
                403,
            )
        if origin is not None and _netloc(origin) != host.lower():
            return f"Origin {quoted(origin)} differs from Host {quoted(host)}; cross-site requests are rejected", 403
        if self._api_key is not None and path not in _PUBLIC_PATHS and not self._authorized(headers):
            return "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'", 401
        if "content-length" in headers and "transfer-encoding" in headers:  # of which proxies may read either
            return "Content-Length and Transfer-Encoding exclude each other; send one of them", 400
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and media_type != "application/json":
            return f"Content-Type {quoted(media_type)} is not supported; send application/json", 415
        return None

    def _authorized(self, headers: Headers) -> bool:
        assert self._api_key is not None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(key.strip().encode(), self._api_key.encode()) and scheme.lower() == "bearer"


def _netloc(origin: str) -> str:
    """Host and port of an Origin header; "" for ``null`` and for malformed values."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
