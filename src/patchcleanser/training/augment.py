"""Augmentation of a batch on its device: flips, shifts, and mild changes of shape and colour."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def augment(images: Tensor, generator: torch.Generator, *, shift: int, strength: float, flip: bool = True) -> Tensor:
    """Randomly flip images [N, 3, H, W] in [0, 1] (if `flip`), shift them by up to `shift` px, warp and recolour them.

    At strength 1 half of the images are rotated by up to 30°, sheared and scaled, and brightness, contrast and
    saturation change by up to half.
    """
    number, device = len(images), images.device
    flipped = torch.rand(number, generator=generator, device=device) < (0.5 if flip else 0.0)
    images = torch.where(flipped[:, None, None, None], images.flip(3), images)
    if shift:
        images = _shift(images, generator, shift)
    if strength > 0:
        images = jitter_colour(_warp(images, generator, strength), generator, strength)
    return images


def uniform(number: int, low: float, high: float, generator: torch.Generator, device: torch.device) -> Tensor:
    """Random numbers [number] between `low` and `high`."""
    return torch.rand(number, generator=generator, device=device) * (high - low) + low


def _shift(images: Tensor, generator: torch.Generator, shift: int) -> Tensor:
    number, _, height, width = images.shape
    padded = functional.pad(images, (shift,) * 4, mode="reflect")
    tops, lefts = (
        torch.randint(0, 2 * shift + 1, (number, 1), generator=generator, device=images.device) for _ in range(2)
    )
    rows = tops + torch.arange(height, device=images.device)
    columns = lefts + torch.arange(width, device=images.device)
    index = torch.arange(number, device=images.device)[:, None, None]
    shifted: Tensor = padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]]
    return shifted.permute(0, 3, 1, 2).contiguous()


def _warp(images: Tensor, generator: torch.Generator, strength: float) -> Tensor:
    number, device = len(images), images.device
    use = (torch.rand(number, generator=generator, device=device) < 0.5).float()
    angle = use * strength * uniform(number, -0.52, 0.52, generator, device)
    shear = use * strength * uniform(number, -0.3, 0.3, generator, device)
    scale = 1 + use * strength * uniform(number, -0.25, 0.25, generator, device)
    cos, sin, zero = angle.cos() * scale, angle.sin() * scale, torch.zeros_like(angle)
    matrix = torch.stack([torch.stack([cos, shear - sin, zero], 1), torch.stack([sin, cos, zero], 1)], dim=1)
    grid = functional.affine_grid(matrix, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def jitter_colour(images: Tensor, generator: torch.Generator, strength: float) -> Tensor:
    """Change brightness, contrast and saturation of each image by up to half the strength."""
    low, high = 1 - 0.5 * strength, 1 + 0.5 * strength
    brightness, contrast, saturation = (
        uniform(len(images), low, high, generator, images.device)[:, None, None, None] for _ in range(3)
    )
    images = images * brightness
    grey = images.mean((1, 2, 3), keepdim=True)
    images = (images - grey) * contrast + grey
    grey = images.mean(1, keepdim=True)
    return ((images - grey) * saturation + grey).clamp(0, 1)
