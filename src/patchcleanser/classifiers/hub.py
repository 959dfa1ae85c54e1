"""Hosts of weights: one that does not respond is an error at once, where the clients would try for most of a minute."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from urllib.parse import urlsplit
from urllib.request import getproxies

import huggingface_hub

from patchcleanser.errors import ClassifierError

TIMEOUT = 5
"""Seconds to wait for a host's first response."""


def require_host(url: str, missing: str, instead: str) -> None:
    """Refuse to fetch what is `missing` here from a host that does not respond; behind a proxy it may, so go on."""
    address = urlsplit(url)
    if getproxies():
        return
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), timeout=TIMEOUT).close()
    except OSError as error:
        reason = error.strerror or error
        raise ClassifierError(
            f"{missing} on this machine, and {address.hostname} cannot be reached ({reason}); {instead}"
        ) from error


def require_hub(repo: str, files: Iterable[str], missing: str, instead: str, cache: str | None = None) -> None:
    """Refuse a repository of the Hugging Face hub, unless one of these files is here or the hub responds."""
    local = (huggingface_hub.try_to_load_from_cache(repo, file, cache) for file in files)
    if not huggingface_hub.constants.HF_HUB_OFFLINE and not any(isinstance(path, str) for path in local):
        require_host(huggingface_hub.constants.ENDPOINT, missing, instead)
