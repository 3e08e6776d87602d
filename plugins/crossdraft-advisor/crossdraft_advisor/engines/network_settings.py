"""Proxies, certificates and headers of HTTP requests, from the environment: honoured or refused, never ignored."""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
from contextlib import suppress
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies

from crossdraft.framework.errors import UsageError, quoted

#: Environment variable with headers by address, as JSON.
HEADERS = "CROSSDRAFT_HEADERS"
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

    Raises:
        UsageError: the variable is not an object of addresses and headers.
    """
    items = _configured(os.environ.get(HEADERS, ""))
    matching = [(address, headers) for address, headers in items if f"{url}/".startswith(f"{address}/")]
    return max(matching, key=lambda item: len(item[0]), default=("", {}))[1]


@lru_cache(maxsize=4)
def _configured(text: str) -> list[tuple[str, dict[str, str]]]:
    """Addresses and their headers. Raises UsageError, see `headers_of`."""
    try:
        items = [(address.rstrip("/"), dict(headers)) for address, headers in json.loads(text or "{}").items()]
        valid = all(_is_header(key, value) for _, headers in items for key, value in headers.items())
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


def _is_header(key: Any, value: Any) -> bool:
    return all(isinstance(text, str) and text.isprintable() and text.isascii() for text in (key, value)) and bool(key)


def proxy_of(url: str) -> str:
    """The address of the proxy for requests to ``url``; empty without one, and for this machine.

    It follows from HTTPS_PROXY or HTTP_PROXY, ALL_PROXY, and NO_PROXY, in either case.

    Raises:
        UsageError: it is not a proxy of HTTP.
    """
    proxies = getproxies()
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # of an invalid URL, which the request fails with
        return ""
    scheme = next((name for name in (parts.scheme, "all") if proxies.get(name)), "")
    if not scheme or not host or _is_loopback(host) or _is_excepted(host, port, proxies.get("no", "")):
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


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


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
