"""What is served, and how much of it anybody may ask for."""

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
    """Fewer than the library opens: every decoder is something to attack."""
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

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "formats" and not value > 0:
                raise InputError(f"the limit {item.name} must be above 0, got {value}")
        for whole, part in (("queue_pixels", "pixels"), ("queue_bytes", "body_bytes"), ("queue", "files")):
            if getattr(self, whole) < getattr(self, part):
                raise InputError(
                    f"{whole} ({getattr(self, whole)}) must have room for one request's {part} ({getattr(self, part)})"
                )


@dataclass(frozen=True)
class Settings:
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
    api_key: str | None = field(default=None, repr=False)
    """If given, every request but those for health and the page must carry it."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.api_key is not None and len(self.api_key) < 16:
            raise InputError(f"an API key has at least 16 characters, got {len(self.api_key)}")
