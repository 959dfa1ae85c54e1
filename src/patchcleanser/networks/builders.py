"""Networks by name, most for 32×32 images and built of timm's layers: the paper's families and the baselines'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
from timm.models.resnet import BasicBlock, ResNet, downsample_conv
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchcleanser.errors import ClassifierError
from patchcleanser.networks.bagnet import bagnet, bagnet17
from patchcleanser.networks.interval import interval_net
from patchcleanser.networks.split import split
from patchcleanser.networks.token_dropping import TokenDropping


class ConvStem(nn.Module):
    """Residual 3×3 convolutions from an image to one token per 4×4 px (the hybrid of the ViT paper).

    From scratch on CIFAR-10, attention learns far better from convolutional features than from raw pixels.
    """

    def __init__(self, width: int = 256, *, size: int = 32, channels: int = 3) -> None:
        super().__init__()
        self.num_patches = (size // 4) ** 2
        quarter, half = width // 4, width // 2
        self.layers = nn.Sequential(
            nn.Conv2d(channels, quarter, 3, 1, 1, bias=False),
            nn.BatchNorm2d(quarter),
            nn.ReLU(inplace=True),
            BasicBlock(quarter, quarter),
            BasicBlock(quarter, quarter),
            _downsampling(quarter, half),
            BasicBlock(half, half),
            _downsampling(half, width),
        )

    def forward(self, images: Tensor) -> Tensor:
        """[N, C, H, W] → [N, tokens, width]."""
        tokens: Tensor = self.layers(images).flatten(2).transpose(1, 2)
        return tokens


def _downsampling(narrow: int, wide: int) -> Any:
    """A residual block that halves the image."""
    return BasicBlock(narrow, wide, stride=2, downsample=downsample_conv(narrow, wide, 1, stride=2))


def resnet(
    classes: int = 10,
    *,
    layers: tuple[int, ...] = (2, 2, 2, 1),
    channels: tuple[int, ...] = (96, 192, 288, 288),
    wider: float = 1.0,
    stem_stride: int = 1,
    drop_path: float = 0.0,
) -> nn.Module:
    """A ResNet of basic blocks with squeeze-and-excitation, a 3×3 stem and `wider` times the channels."""
    if wider != 1:
        channels = tuple(max(8, int(wider * number) // 8 * 8) for number in channels)
    model: nn.Module = ResNet(
        BasicBlock,
        layers,
        num_classes=classes,
        channels=channels,
        stem_type="deep",  # the kind whose width can be set; it is replaced by one convolution
        stem_width=channels[0] // 2,
        drop_path_rate=drop_path,
        block_args={"attn_layer": "se"},
    )
    model.conv1 = nn.Conv2d(3, channels[0], 3, stem_stride, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


def vit(
    classes: int = 10, *, width: int = 256, depth: int = 6, heads: int = 4, mlp: float = 4.0, drop_path: float = 0.1
) -> nn.Module:
    """A ViT with 64 tokens behind a convolutional stem; its MLPs are `mlp` times as wide as its tokens."""
    model: nn.Module = VisionTransformer(
        img_size=32,
        patch_size=4,
        num_classes=classes,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        mlp_ratio=mlp,
        class_token=False,
        global_pool="avg",
        drop_path_rate=drop_path,
    )
    model.patch_embed = ConvStem(width)
    return model


def resmlp(classes: int = 10, *, width: int = 256, depth: int = 8, drop_path: float = 0.1) -> nn.Module:
    """A ResMLP with 64 tokens behind a convolutional stem."""
    model: nn.Module = MlpMixer(
        num_classes=classes,
        img_size=32,
        patch_size=4,
        num_blocks=depth,
        embed_dim=width,
        mlp_ratio=4,
        block_layer=ResBlock,
        norm_layer=Affine,
        drop_path_rate=drop_path,
    )
    model.stem = ConvStem(width)
    return model


def tiny(classes: int = 10) -> nn.Module:
    """A ResNet of 1.4 million parameters whose stem halves the image, for CPUs."""
    return resnet(classes, layers=(2, 2, 2, 1), channels=(48, 96, 128, 160), stem_stride=2)


class Ablated(nn.Module):
    """A network for images of which little is visible; one more channel is 1 where a pixel is hidden.

    Colours are encoded as x and 1 - x, both 0 where hidden (Levine and Feizi, 2020). No visible pixel looks like a
    hidden one, since its two values add up to 1.
    """

    mask_aware = True

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        """[N, 4, H, W] → logits."""
        images, visible = inputs[:, :-1], 1 - inputs[:, -1:]
        logits: Tensor = self.network(torch.cat([images * visible, (1 - images) * visible], dim=1))
        return logits


def ablated(classes: int = 10, **options: Any) -> nn.Module:
    """The ResNet as the base classifier of de-randomized smoothing."""
    network: Any = resnet(classes, **options)
    stem = network.conv1
    network.conv1 = nn.Conv2d(6, stem.out_channels, 3, stem.stride, 1, bias=False)
    return Ablated(network)


def smoothed_vit(classes: int = 10, *, width: int = 192, depth: int = 8, heads: int = 3) -> nn.Module:
    """A ViT with 4×4-px tokens that drops hidden ones, the base classifier of Smoothed ViT."""
    return TokenDropping(VisionTransformer(32, 4, num_classes=classes, embed_dim=width, depth=depth, num_heads=heads))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet": resnet,
    "vit": vit,
    "resmlp": resmlp,
    "tiny": tiny,
    "bagnet": bagnet,
    "bagnet17": bagnet17,
    "split": split,
    "interval": interval_net,
    "ablated": ablated,
    "smoothed-vit": smoothed_vit,
}

INPUT = {"bagnet17": 224}
"""The side of a network's input in px, where it is not 32."""


def build_network(name: str, options: dict[str, Any]) -> nn.Module:
    """One of NETWORKS with options from a spec string."""
    if name not in NETWORKS:
        raise ClassifierError.unknown("network", name, NETWORKS)
    try:
        return NETWORKS[name](**options)
    except TypeError as error:
        raise ClassifierError(f"network {name!r} does not take {options}: {error}") from error
