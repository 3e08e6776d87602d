"""Loopback addresses, and the Host header that a server on the loopback interface accepts.

DNS rebinding makes the name of a web page resolve to this machine, so that the page counts as the same site and can
read responses. Its requests carry that name in the Host header, so any name that is not a loopback name is rejected.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """True for a host name or address of the loopback interface."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_loopback_header(header: str) -> bool:
    """True if a Host header, with or without a port, names the loopback interface; False if it is malformed."""
    try:
        return is_loopback(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return False
