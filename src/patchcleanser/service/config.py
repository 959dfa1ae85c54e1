"""What is served, and within which limits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from patchcleanser.core.threats import Threat
from patchcleanser.errors import InputError

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Bounds that are checked before anything costs memory or time."""

    body_bytes: int = 32 * MIB
    """Of a whole request."""
    file_bytes: int = 10 * MIB
    """Of one encoded image."""
    files: int = 16
    """Images in one request."""
    pixels: int = 16_777_216
    """Of one image, as its header says, before it is decoded."""
    formats: tuple[str, ...] = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
    """Fewer than the library opens: every decoder can be attacked."""
    masks: int = 8
    """The most masks per axis that a request may choose."""
    map_positions: int = 1_000_000
    """Positions of patches in one answer's maps."""
    deadline: float = 30.0
    """Seconds from the first byte of a request to its answer."""
    queue: int = 256
    """Images accepted and not answered yet; with more, requests are turned away."""
    queue_pixels: int = 67_108_864
    """Pixels of those images: 12 bytes each when decoded."""
    queue_bytes: int = 256 * MIB
    """Bytes of request bodies that are held at once."""
    together: int = 64
    """Images the model works on at once."""
    url_bytes: int = 8 * 1024
    """Of a request's address, with its query."""
    headers: int = 100
    """Header fields of a request, and trailer fields of its body."""
    header_bytes: int = 32 * 1024
    """Of all of them together, with the request line."""
    head_seconds: float = 10.0
    """From the start of a request, or of a connection, until all of its headers are there."""
    connections: int = 512
    """Open connections."""
    client_connections: int = 128
    """Open connections from one address; trusted proxies may have more."""
    client_share: float = 0.25
    """Part of the queue's images, pixels and bytes, and of the decoders, that one client may hold; at least what one
    request may have."""
    small_pixels: int = 1_048_576
    """A request of images with no more pixels together is a small one."""
    small_share: float = 0.25
    """Part of the queue's pixels, and of the decoders, that large requests leave to small ones."""
    decoders: int = 2
    """Processes that decode images."""
    decode_seconds: float = 5.0
    """For one image; then its decoder is killed."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "formats" and not value > 0:
                raise InputError(f"the limit {item.name} must be above 0, got {value}")
        for queue, request in (("queue_pixels", "pixels"), ("queue_bytes", "body_bytes"), ("queue", "files")):
            size, need = getattr(self, queue), getattr(self, request)
            if size < need:
                raise InputError(f"{queue} ({size}) must have room for one request's {request} ({need})")
        if self.client_share > 1:
            raise InputError(f"client_share is a part, above 0 and at most 1, got {self.client_share}")
        if self.small_share >= 1:
            raise InputError(f"small_share is a part, above 0 and below 1, got {self.small_share}")

    # What one client may hold, and what large requests may hold together.

    @property
    def client_images(self) -> int:
        return max(self.files, int(self.queue * self.client_share))

    @property
    def client_pixels(self) -> int:
        """Also the most that one request may have."""
        return min(self.large_pixels, max(self.pixels, int(self.queue_pixels * self.client_share)))

    @property
    def client_bytes(self) -> int:
        return max(self.body_bytes, int(self.queue_bytes * self.client_share))

    @property
    def client_decoders(self) -> int:
        return max(1, int(self.decoders * self.client_share))

    @property
    def large_pixels(self) -> int:
        return max(self.pixels, int(self.queue_pixels * (1 - self.small_share)))

    @property
    def large_decoders(self) -> int:
        return max(1, int(self.decoders * (1 - self.small_share)))


@dataclass(frozen=True)
class ServiceSettings:
    """Everything `create_app` needs."""

    model: Any = "zoo:tiny"
    """As in load_classifier, or a classifier, a torch module or a function."""
    threat: Threat = field(default_factory=lambda: Threat.share(0.02))
    defense: str = "double-masking"
    options: dict[str, Any] = field(default_factory=dict)
    """What the defense takes besides masks: a threshold, a seed."""
    masks: int | tuple[int, int] | None = None
    stride: int | tuple[int, int] | None = None
    precision: str = "exact"
    device: str = "auto"
    samples: str | None = "sample"
    """Images that the page offers, by dataset name; clean and trusted."""
    api_key: str | tuple[str, ...] | None = field(default=None, repr=False)
    """If given, requests must carry it, but for health, the page and /docs. Of several, each is one client's."""
    hosts: tuple[str, ...] = ()
    """Names that requests may give as their Host, besides localhost and IP addresses; "*" is any."""
    proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies. Their X-Forwarded-For names the client."""
    limits: Limits = field(default_factory=Limits)
    trust_code: bool = False
    """Whether a card that `model` leads to may name code, as in load_classifier."""

    def __post_init__(self) -> None:
        for key in self.keys:
            if len(key) < 16:
                raise InputError(f"an API key has at least 16 characters, got {len(key)}")
        for host in self.hosts:
            if "/" in host or ":" in host:
                raise InputError(f"an allowed host is a name without scheme and port, got {host!r}")

    @property
    def keys(self) -> tuple[str, ...]:
        """The API keys; none if requests need none."""
        if self.api_key is None:
            return ()
        return (self.api_key,) if isinstance(self.api_key, str) else self.api_key
