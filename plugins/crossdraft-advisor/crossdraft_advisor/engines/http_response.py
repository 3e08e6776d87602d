"""HTTP responses of other programs, bounded in bytes and in time.

Proxies, certificates and headers from the environment are honoured or refused, never ignored.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from http.client import HTTPMessage
from ipaddress import ip_address, ip_network
from posixpath import normpath
from queue import Empty, Full, Queue
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import (
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    build_opener,
    getproxies,
)

from crossdraft import CrossdraftError, Limit, UsageError, first_line, printable, quoted
from crossdraft.commands import is_loopback

from ..limits import METRICS_BYTES

_PART, _PARTS = 2**16, 16  # bytes of a part, and parts that wait to be read
_ERROR_BYTES, _ERROR_TEXT = 4096, 300  # bytes of the body of an error, and characters of it in a message
_ERROR_SECONDS = 5.0  # seconds for the body of an error


class NetworkError(CrossdraftError):
    """A server that cannot be reached, or a response that breaks off or exceeds its limits."""


class _NoRedirects(HTTPRedirectHandler):
    """Redirects are responses, since the address they lead to was not given by the user."""

    def redirect_request(self, *args: Any) -> None:
        return None


@lru_cache(maxsize=8)
def _opener(proxy: str, certificates: tuple[str | None, ...] | None) -> OpenerDirector:
    """Opener of requests by ``proxy``, or without one. Raises UsageError, see `tls_context`."""
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
    places = [
        (parts.port or (443 if parts.scheme == "https" else 80), normpath("/" + unquote(parts.path).lstrip("/")))
        for parts in (first, second)
    ]
    if places[0] != places[1]:
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
        UsageError: headers, the proxy or certificates in the environment are invalid, see `headers_of`.
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
        certificates = tuple(os.environ.get(name) for name in CERTIFICATES) if url.startswith("https:") else None
        opener = _opener(self._proxy, certificates)
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
        """The next bytes; empty at the end. Raises NetworkError if the connection broke off or a limit is exceeded."""
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


HEADERS = "CROSSDRAFT_HEADERS"  # environment variable with headers by address, as JSON
#: Environment variables with certificates of authorities, a file or a directory: of OpenSSL, requests and curl. The
#: first that is set is used.
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
#: Headers whose values are credentials, and the fewest characters of a part of their values and of those of others.
_CREDENTIAL = re.compile(r"auth|cookie|key|token|secret|pass|sess|sign|jwt", re.IGNORECASE)
_FEWEST, _FEWEST_OF_OTHERS = 4, 8
_SCHEME = re.compile(r"(?:basic|bearer|digest|negotiate|token|apikey)\s+", re.IGNORECASE)


def headers_of(url: str) -> dict[str, str]:
    """Headers of requests to ``url``, by `HEADERS`: those of the longest address that begins it.

    A recipe cannot set headers, because it could send a user's key to another server.

    Raises UsageError: the variable is not an object of addresses and headers.
    """
    items = _configured(os.environ.get(HEADERS, ""))
    matching = [(address, headers) for address, headers in items if f"{url}/".startswith(f"{address}/")]
    return max(matching, key=lambda item: len(item[0]), default=("", {}))[1]


@lru_cache(maxsize=4)
def _configured(text: str) -> list[tuple[str, dict[str, str]]]:
    """Addresses and their headers. Raises UsageError, see `headers_of`."""
    try:
        items = [(address.rstrip("/"), dict(headers)) for address, headers in json.loads(text or "{}").items()]
        headers = [item for _, of_address in items for item in of_address.items()]
        texts = [text for header in headers for text in header]
        valid = all(isinstance(text, str) and text.isprintable() and text.isascii() for text in texts)
        valid = valid and all(key for key, _ in headers)
    except (AttributeError, RecursionError, TypeError, ValueError):
        valid = False
    if not valid:
        raise UsageError(
            f"{HEADERS} must be JSON of addresses and their headers, as in "
            '{"https://gpu.example.com": {"Authorization": "Bearer KEY"}}'
        )
    return items


def redacted(text: str) -> str:
    """A text of a server without the values of `HEADERS` and their parts, such as an API key.

    Everything that a server sends passes through it before it is parsed, printed or stored.
    """
    with suppress(UsageError):  # of the variable, which requests fail with
        for part in _secret_parts(os.environ.get(HEADERS, "")):
            text = text.replace(part, "***")
    return text


@lru_cache(maxsize=4)
def _secret_parts(text: str) -> list[str]:
    """Values of all headers, their words, and both as addresses and JSON write them; the longest first."""
    parts: set[str] = set()
    for _, headers in _configured(text):
        for name, value in headers.items():
            value = _SCHEME.sub("", value.strip(), count=1)
            values = {value, *re.split(r"[\s;,=\"']+", value)}
            with suppress(ValueError):  # user and password of Basic
                decoded = base64.b64decode(value, validate=True).decode()
                values |= {decoded, *decoded.split(":", 1)}
            fewest = _FEWEST if _CREDENTIAL.search(name) else _FEWEST_OF_OTHERS
            parts |= {part for part in values if len(part) >= fewest}
    written = (f(part) for part in parts for f in (quote, lambda t: quote(t, safe=""), lambda t: json.dumps(t)[1:-1]))
    return sorted({*parts, *written, *(part.replace("/", "\\/") for part in parts)}, key=len, reverse=True)


def proxy_of(url: str) -> str:
    """The address of the proxy for requests to ``url``; empty without one, and for this machine.

    It follows from HTTPS_PROXY or HTTP_PROXY, ALL_PROXY, and NO_PROXY, in either case.

    Raises UsageError: it is not a proxy of HTTP.
    """
    proxies = getproxies()
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # of an invalid URL, which the request fails with
        return ""
    scheme = next((name for name in (parts.scheme, "all") if proxies.get(name)), "")
    own = is_loopback(host) or host.endswith(".localhost")
    if not scheme or not host or own or _is_excepted(host, port, proxies.get("no", "")):
        return ""
    name, proxy = f"{scheme.upper()}_PROXY", proxies[scheme]
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    try:
        address = urlsplit(proxy)
        valid = bool(address.scheme == "http" and address.hostname and address.port != 0)
    except ValueError:
        valid = False
    if not valid:
        kind = proxy.partition("://")[0]
        raise UsageError(
            f"{name} is not the address of an HTTP proxy"
            + (f" but of {quoted(kind, 20)}" if kind != "http" else "")
            + f"; give one, as in http://proxy.example.com:3128 (it carries HTTPS, too), or add {host} to NO_PROXY"
        )
    return proxy


def _is_excepted(host: str, port: int, names: str) -> bool:
    """True if NO_PROXY has a host: by its name, the end of its name, its address, a network, or ``*``."""
    for entry in filter(None, re.split(r"[,\s]+", names.lower())):
        name, colon, number = entry.rpartition(":") if entry.count(":") == 1 else (entry, "", "")
        if colon and number != str(port):
            continue
        name = name.strip("[]").removeprefix("*").lstrip(".")
        if not name or host == name or host.endswith(f".{name}"):
            return True
        try:
            if ip_address(host) in ip_network(name, strict=False):
                return True
        except ValueError:
            continue
    return False


def tls_context() -> ssl.SSLContext:
    """Certificates of the system, and those of `CERTIFICATES`. Raises UsageError if they cannot be read."""
    context = ssl.create_default_context()
    if name := next((name for name in CERTIFICATES if os.environ.get(name)), ""):
        path = os.environ[name]
        try:
            context.load_verify_locations(**{"capath" if os.path.isdir(path) else "cafile": path})
        except OSError as error:
            raise UsageError(
                f"{name} is {quoted(path)}, which has no readable certificates ({error.strerror or 'not PEM'}); give "
                "a file of PEM certificates, or unset it"
            ) from None
    return context
