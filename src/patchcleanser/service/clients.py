"""Who sends a request: the client it counts for, the host it names, the site whose page made a browser send it."""

from __future__ import annotations

import hmac
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from patchcleanser.errors import InputError
from patchcleanser.service.problems import RefusedError

ANY_HOST = "*"
DEFAULT_PORTS = {"http": 80, "https": 443}
SITE_BITS = 64
"""Whoever has one IPv6 address has all that begin with the same bits."""


class Proxies:
    """Addresses and networks of proxies, whose X-Forwarded-For is believed.

    >>> proxies = Proxies(("10.0.0.0/8",))
    >>> "10.1.2.3" in proxies, "8.8.8.8" in proxies
    (True, False)
    >>> proxies.client("10.1.2.3", ["6.6.6.6, 8.8.8.8, 10.9.9.9"])  # what the client itself wrote stands first
    '8.8.8.8'
    """

    def __init__(self, networks: tuple[str, ...]) -> None:
        try:
            self._networks: list[IPv4Network | IPv6Network] = [ip_network(text) for text in networks]
        except ValueError as error:
            raise InputError(f"a proxy is an IP address or a network as 10.0.0.0/8; {error}") from None

    def __contains__(self, address: str) -> bool:
        try:
            parsed = ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self._networks)

    def client(self, peer: str, forwarded: list[str]) -> str:
        """The address that the outermost proxy was connected to; the peer's own if that is no proxy."""
        chain = [address.strip() for line in forwarded for address in line.split(",")]
        while peer in self and chain:
            peer = chain.pop()
        return peer


def client_name(scope: Scope, headers: Headers, keys: tuple[str, ...], proxies: Proxies) -> str:
    """The client that a request counts for: its key where there are several, else its address."""
    if len(keys) > 1:
        return f"key {matching_key(headers, keys)}"
    peer = scope["client"][0] if scope.get("client") else ""
    address = proxies.client(peer, headers.getlist("x-forwarded-for"))
    try:
        parsed = ip_address(address)
    except ValueError:
        return peer
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(ip_network((parsed, SITE_BITS), strict=False))
    return address


def matching_key(headers: Headers, keys: tuple[str, ...]) -> int | None:
    """The number of the key that a request carries; None if it carries none of them.

    Compared in constant time, so that answers do not tell how much of a guess was right.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    sent = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    matches = [hmac.compare_digest(key.encode(), sent.encode()) for key in keys]
    return matches.index(True) if any(matches) else None


def check_host(headers: Headers, hosts: tuple[str, ...]) -> None:
    """Refuse a Host that is not served here: a page of another name that its owner made resolve to this address.

    An IP address is always taken: there is no name in it that somebody could let point elsewhere.
    """
    names = headers.getlist("host")
    name = _host_name(names[0]) if len(names) == 1 else ""
    local = name == "localhost" or name.endswith(".localhost")
    if not (ANY_HOST in hosts or local or _is_address(name) or name in map(str.lower, hosts)):
        words = "the Host of this request is not served here; allow it with --allow-host if it is this service's name"
        raise RefusedError("wrong-host", words)


def check_site(method: str, headers: Headers) -> None:
    """Refuse what another site's page made a browser send. What is no browser sends neither header.

    Browsers send Sec-Fetch-Site to https and to localhost, and Origin with every POST.
    """
    if method in ("GET", "HEAD", "OPTIONS"):
        return
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    own = site in ("same-origin", "none") if site is not None else origin is None or _is_own(origin, headers)
    if not own:
        raise RefusedError("cross-site", "requests from other sites' pages are not taken; send it from this one's own")


def _is_own(origin: str, headers: Headers) -> bool:
    """Whether an origin has the host and port of this request. A proxy may speak TLS for us, so schemes may differ."""
    page, asked = _split(origin), _split(f"//{headers.get('host', '')}")
    if page is None or asked is None or page.scheme not in DEFAULT_PORTS:
        return False
    default = DEFAULT_PORTS[page.scheme]
    return page.hostname == asked.hostname and (page.port or default) == (asked.port or default)


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises if it is no number
    except ValueError:
        return None
    return parts if parts.hostname else None


def _host_name(host: str) -> str:
    parts = _split(f"//{host}")
    plain = parts is not None and not parts.path and "@" not in host
    return (parts.hostname or "").removesuffix(".") if plain and parts is not None else ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
