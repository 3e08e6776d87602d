"""HTTP responses of other programs, bounded in bytes and in time."""

from __future__ import annotations

import json
import math
import os
import posixpath
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from http.client import HTTPMessage
from ipaddress import ip_address
from queue import Empty, Full, Queue
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from crossdraft.framework.errors import CrossdraftError, first_line, printable, quoted
from crossdraft.framework.util.limits import METRICS_BYTES, Limit

from .network_settings import CERTIFICATES, HEADERS, headers_of, proxy_of, redacted, tls_context

#: Bytes of a part, and parts that wait to be read.
_PART, _PARTS = 2**16, 16
#: Bytes of the body of an error, and characters of it in a message.
_ERROR_BYTES, _ERROR_TEXT = 4096, 300
#: Seconds for the body of an error.
_ERROR_SECONDS = 5.0


class NetworkError(CrossdraftError):
    """A server that cannot be reached, or a response that breaks off or exceeds its limits."""


class _NoRedirects(HTTPRedirectHandler):
    """Redirects are responses, since the address they lead to was not given by the user."""

    def redirect_request(self, *args: Any) -> None:
        return None


def _opener(url: str, proxy: str) -> OpenerDirector:
    """Opener of requests by ``proxy``, or without one. Raises UsageError, see `tls_context`."""
    certificates = tuple(os.environ.get(name) for name in CERTIFICATES) if url.startswith("https:") else None
    return _made_opener(proxy, certificates)


@lru_cache(maxsize=8)
def _made_opener(proxy: str, certificates: tuple[str | None, ...] | None) -> OpenerDirector:
    context = None if certificates is None else tls_context()
    proxies: dict[str, str] = {"http": proxy, "https": proxy} if proxy else {}
    return build_opener(_NoRedirects, ProxyHandler(proxies), *([HTTPSHandler(context=context)] if context else []))


def without_password(url: str) -> str:
    """The address without the user name and the password in it."""
    return re.sub(r"^(\w+://)[^/?#]*@", r"\1", url)


def unfit(url: str) -> str | None:
    """The reason why ``url`` is not the address of a server; None if it is."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            return "it does not begin with http:// or https://"
        if not parts.hostname or (parts.port is not None and not parts.port):
            return "it has no host, or port 0"
        parts.hostname.encode("idna")
        if "@" in parts.netloc:
            return f"it has a user name or a password; set {HEADERS} instead (docs/remote.md)"
    except ValueError as error:
        return first_line(error)
    if any(c.isspace() or not c.isprintable() for c in url):
        return "it has a space or a control character"
    return "it has a query or a fragment" if parts.query or parts.fragment else None


def fetch(url: str, seconds: float) -> tuple[int, str]:
    """Send a GET request; returns the status and the body. Raises NetworkError."""
    with HttpResponse(url, seconds=seconds, maximum=METRICS_BYTES) as response:
        return response.status, redacted(response.body().decode("utf-8", "replace"))


def same_server(url: str, other: str) -> bool:
    """True if two addresses name the same server, also by other names of this machine or by an address of the host."""
    first, second = urlsplit(url), urlsplit(other)
    if _port(first) != _port(second) or _path(first) != _path(second):
        return False
    hosts = [(parts.hostname or "").rstrip(".") for parts in (first, second)]
    if hosts[0] == hosts[1]:
        return True
    addresses = [_addresses(host) for host in hosts]
    own = _addresses(socket.gethostname())
    if all(a & own or any(ip_address(x).is_loopback or ip_address(x).is_unspecified for x in a) for a in addresses):
        return True
    # Two names with one address may be virtual hosts.
    return bool(addresses[0] & addresses[1]) and any(host in a for host, a in zip(hosts, addresses, strict=True))


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def _path(parts: SplitResult) -> str:
    return posixpath.normpath("/" + unquote(parts.path).lstrip("/"))


@lru_cache(maxsize=256)
def _addresses(host: str) -> frozenset[str]:
    """IP addresses of a host; empty if its name cannot be resolved."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    addresses = [ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    return frozenset(str(getattr(a, "ipv4_mapped", None) or a) for a in addresses)


class HttpResponse:
    """The response to a request, read part by part.

    A daemon thread reads, because a socket's time limit is for a single read: a server that sends a byte now and then,
    or endless headers, could block forever.

    Args:
        body: value to send as JSON by POST; by default the request is a GET.
        seconds, maximum: time and bytes until the end of the response, or until `renew`.
        whole_seconds, whole: time and bytes of the whole response, which `renew` does not restart; None: without limit.
        clock: seconds, for tests.

    Attributes:
        status: of HTTP. Redirects are not followed.

    Raises:
        NetworkError: the server cannot be reached, or does not answer in time.
        UsageError: headers, the proxy or certificates in the environment are invalid, see `network_settings`.
    """

    def __init__(
        self,
        url: str,
        body: Any = None,
        *,
        seconds: float,
        maximum: Limit,
        whole_seconds: float = math.inf,
        whole: Limit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._seconds, self._most, self._whole, self._clock = seconds, maximum, whole, clock
        self._whole_seconds, self._end, self._total = whole_seconds, clock() + whole_seconds, 0
        self._parts: Queue[Any] = Queue(_PARTS)
        self._closed = threading.Event()
        own, self._proxy = headers_of(url), proxy_of(url)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"} | own
        data = None if body is None else json.dumps(body).encode()
        opener = _opener(url, self._proxy)
        self.renew()
        threading.Thread(target=self._fetch, args=(opener, url, data, headers), daemon=True).start()
        try:
            self.status, self._headers = self._next()
        except NetworkError:
            self._closed.set()
            raise

    def __enter__(self) -> HttpResponse:
        return self

    def __exit__(self, *_: Any) -> None:
        self._closed.set()

    def renew(self) -> None:
        """Restart the limits of bytes and time, except those of the whole response."""
        self._deadline, self._received = self._clock() + self._seconds, 0

    def read(self) -> bytes:
        """Return the next bytes; empty at the end.

        Raises:
            NetworkError: the connection broke off, or a limit is exceeded.
        """
        part: bytes = self._next()
        self._received += len(part)
        self._total += len(part)
        reason = self._most.violation(self._received)
        if reason := reason or (None if self._whole is None else self._whole.violation(self._total)):
            raise NetworkError(f"the response is too large; in bytes, {reason}")
        return part

    def body(self) -> bytes:
        """All bytes. Raises NetworkError."""
        return b"".join(iter(self.read, b""))

    def error(self) -> str:
        """Describe a response whose status is not 200, with the beginning of its body."""
        if 300 <= self.status < 400 and (address := self._headers.get("Location")):
            return f"status {self.status}: it redirects to {quoted(redacted(address))}; give that address"
        self._seconds, text = min(self._seconds, _ERROR_SECONDS), b""
        self.renew()
        try:
            while len(text) < _ERROR_BYTES and (part := self.read()):
                text += part
        except NetworkError:
            text = text or b"(the body is incomplete)"
        shown = redacted(" ".join(printable(line) for line in text.decode("utf-8", "replace").split("\n")))
        shown = shown if len(shown) <= _ERROR_TEXT else shown[: _ERROR_TEXT - 1] + "…"
        if self.status in (401, 403):
            shown = f"{shown}; set {HEADERS} to the headers of this address, such as an API key (docs/remote.md)"
        return f"status {self.status}: {shown}"

    def _next(self) -> Any:
        try:
            now = self._clock()
            if now > self._end:
                raise Empty
            item = self._parts.get(timeout=max(min(self._deadline, self._end) - now, 0))
        except Empty:
            seconds = self._whole_seconds if self._end < self._deadline else self._seconds
            raise NetworkError(f"the response was not complete after {seconds:g} s") from None
        if isinstance(item, Exception):
            raise NetworkError(self._reason(item))
        return item

    def _reason(self, error: Exception) -> str:
        """The first line of an error, and the setting that it may be due to."""
        text = first_line(error)
        if str(error) != redacted(str(error)):  # a line of the server
            text = f"{type(error).__name__}: {redacted(printable(str(error)))[:_ERROR_TEXT]}"
        if isinstance(error, URLError) and isinstance(error.reason, ssl.SSLCertVerificationError):
            text += f"; name the certificates of a private authority in {CERTIFICATES[0]}"
        if self._proxy:
            parts = urlsplit(self._proxy)
            text += f"; requests go through the proxy {parts.hostname}:{parts.port or 80}, NO_PROXY excepts hosts"
        return text

    def _fetch(self, opener: OpenerDirector, url: str, data: bytes | None, headers: dict[str, str]) -> None:
        try:
            try:
                response = opener.open(Request(url, data, headers), timeout=self._seconds)
            except HTTPError as error:
                response = error
            with response:
                sent = self._put((response.status, response.headers or HTTPMessage()))
                while sent:
                    part = response.read1(_PART)
                    if not part and getattr(response, "length", None):
                        raise ConnectionError("the connection was closed before the end of the response")
                    sent = self._put(part) and bool(part)
        except Exception as error:  # of the network, http.client, or an invalid URL
            self._put(error)

    def _put(self, item: Any) -> bool:
        """Hand an item over; False if the response is no longer read."""
        while not self._closed.is_set():
            try:
                self._parts.put(item, timeout=1)
                return True
            except Full:
                continue
        return False
