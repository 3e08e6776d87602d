"""Who may send requests: checks of Host, Origin, API key and media type, made before a body is read.

A web page that a user of this machine visits can send requests to it. A page of another site sends its Origin, and can
post without a preflight only what is not ``application/json``. A page whose own name is made to resolve to this machine
(DNS rebinding) counts as the same site, so it could read the answers; its requests carry that name as Host.
"""

from __future__ import annotations

import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import quoted
from .errors import error_response

#: Paths that need no API key: they return counts only.
_OPEN = frozenset({"/health"})


def is_loopback(host: str) -> bool:
    """True for a host name or address of the loopback interface."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class AccessControl:
    """ASGI middleware that refuses requests of other sites and, if there is an API key, those without it.

    Args:
        app: the application.
        loopback: whether the server listens on the loopback interface only, so that no other Host is right.
        api_key: what ``Authorization: Bearer`` must hold; None = no key is needed.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool, api_key: str | None):
        self._app, self._loopback, self._api_key = app, loopback, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(Headers(scope=scope), scope["path"], scope["method"])):
            message, status = refusal
            await error_response(message, status)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, path: str, method: str) -> tuple[str, int] | None:
        """Why a request is refused, and with which status."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._loopback and not is_loopback(_name(host)):
            return (
                f"Host {quoted(host)} is not this machine: the server listens on the loopback interface, so the host "
                "must be localhost, 127.0.0.1 or [::1]",
                403,
            )
        if origin is not None and _netloc(origin) != host.lower():
            return (
                f"Origin {quoted(origin)} is another site than {quoted(host)}; requests of other sites are refused",
                403,
            )
        if self._api_key is not None and path not in _OPEN and not self._authorized(headers.get("authorization", "")):
            return "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'", 401
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            return f"Content-Type {quoted(kind)} is not supported; send application/json", 415
        return None

    def _authorized(self, given: str) -> bool:
        assert self._api_key is not None
        scheme, _, key = given.partition(" ")
        same = hmac.compare_digest(key.strip().encode(), self._api_key.encode())
        return scheme.lower() == "bearer" and same


def _name(host: str) -> str:
    """The host of a Host header, without port and brackets; "" if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _netloc(origin: str) -> str:
    """Host and port of an origin; "" if it has none, as ``null``."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
