"""Who sends a request, from which site, and how much of the service's capacity each client holds."""

from __future__ import annotations

import hmac
import threading
from collections import Counter
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
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
            self._networks = [ip_network(text) for text in networks]
        except ValueError as error:
            raise InputError(f"a proxy is an IP address or a network as 10.0.0.0/8; {error}") from None

    def __contains__(self, address: str) -> bool:
        parsed = _ip_address(address)
        return parsed is not None and any(parsed in network for network in self._networks)

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
    parsed = _ip_address(address)
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(ip_network((parsed, SITE_BITS), strict=False))
    return peer if parsed is None else address


def matching_key(headers: Headers, keys: tuple[str, ...]) -> int | None:
    """The index of the key that a request carries; None if it carries none of them.

    Compared in constant time, so that answers do not tell how much of a guess was right.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    sent = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    matches = [hmac.compare_digest(key.encode(), sent.encode()) for key in keys]
    return matches.index(True) if any(matches) else None


def check_host(headers: Headers, hosts: tuple[str, ...]) -> None:
    """Refuse a Host that is not served here (DNS rebinding: a foreign name that resolves to this address).

    An IP address is always taken: no foreign name can stand in it.
    """
    fields = headers.getlist("host")
    name = _host_name(fields[0]) if len(fields) == 1 else ""
    local = name == "localhost" or name.endswith(".localhost")
    if not (ANY_HOST in hosts or local or _ip_address(name) or name in map(str.lower, hosts)):
        message = "the Host of this request is not served here; allow it with --allow-host if it is this service's name"
        raise RefusedError("wrong-host", message)


def check_site(method: str, headers: Headers) -> None:
    """Refuse what another site's page made a browser send. Other programs send neither header.

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
    page, host = _split(origin), _split(f"//{headers.get('host', '')}")
    if page is None or host is None or page.scheme not in DEFAULT_PORTS:
        return False
    default = DEFAULT_PORTS[page.scheme]
    return page.hostname == host.hostname and (page.port or default) == (host.port or default)


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises if it is no number
    except ValueError:
        return None
    return parts if parts.hostname else None


def _host_name(host: str) -> str:
    parts = _split(f"//{host}")
    if parts is None or parts.path or "@" in host:
        return ""
    return (parts.hostname or "").removesuffix(".")


def _ip_address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


class Reservation:
    """Capacity that is held until it is released."""

    def __init__(self, capacity: Capacity, client: str, amounts: dict[str, int]) -> None:
        self._capacity, self._client, self._amounts = capacity, client, amounts

    def release(self) -> None:
        """Give it back; again does nothing."""
        amounts, self._amounts = self._amounts, {}
        self._capacity._give_back(self._client, amounts)


class Capacity:
    """Bounded amounts of several things, and of each a share that one client may hold. Safe to use from any thread.

    >>> capacity = Capacity(images=2, pixels=100, shares={"pixels": 90})
    >>> (reservation,) = capacity.reserve("ann", {"images": 1, "pixels": 90})
    >>> capacity.used("pixels"), capacity.used("images")
    (90, 1)
    >>> capacity.reserve("ann", {"pixels": 1})
    Traceback (most recent call last):
    patchcleanser.service.problems.RefusedError: this client would have 91 pixels here at once; at most 90 are taken...
    >>> capacity.reserve("bob", {"pixels": 11})
    Traceback (most recent call last):
    patchcleanser.service.problems.RefusedError: too much is waiting already; try again later
    >>> reservation.release(); reservation.release()
    >>> capacity.used("images")
    0
    """

    def __init__(self, *, shares: Mapping[str, int] | None = None, **sizes: int) -> None:
        self._sizes, self._shares = sizes, {**sizes, **(shares or {})}
        self._used: Counter[str] = Counter()
        self._clients: dict[str, Counter[str]] = {}
        self._lock = threading.Lock()

    def reserve(self, client: str, *parts: dict[str, int], retry_after: int = 1) -> list[Reservation]:
        """Take all parts, or raise RefusedError and take none."""
        amounts = sum(map(Counter, parts), Counter[str]())
        with self._lock:
            if any(self._used[name] + amount > self._sizes[name] for name, amount in amounts.items()):
                raise RefusedError(
                    "overloaded", "too much is waiting already; try again later", retry_after=retry_after
                )
            held = self._clients.get(client, Counter[str]()) + amounts
            for name, limit in self._shares.items():
                if held[name] > limit:
                    message = f"this client would have {held[name]:,} {name} here at once; at most {limit:,} are taken"
                    message += "; wait for the answers to earlier requests"
                    raise RefusedError("too-many-requests", message, retry_after=retry_after)
            self._used += amounts
            self._clients[client] = held
        return [Reservation(self, client, part) for part in parts]

    def used(self, name: str) -> int:
        return self._used[name]

    def _give_back(self, client: str, amounts: dict[str, int]) -> None:
        with self._lock:
            self._used -= Counter(amounts)
            self._clients[client] = self._clients.get(client, Counter[str]()) - Counter(amounts)
            if not self._clients[client]:
                del self._clients[client]
