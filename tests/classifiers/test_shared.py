"""First layers are computed once for many unions of masks, and nothing else changes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser import DoubleMasking, Preprocessing, Threat, TorchClassifier
from patchcleanser.classifiers import cuts, shared
from patchcleanser.classifiers.batches import Piece, Subject
from patchcleanser.classifiers.copied import Copied
from patchcleanser.classifiers.covering import covered
from patchcleanser.classifiers.cuts import cut, first_layers, sees_no_more
from patchcleanser.classifiers.fast import Exported
from patchcleanser.classifiers.fields import Field, NotLocalError, fields_of
from patchcleanser.classifiers.layouts import Layout
from patchcleanser.classifiers.rewrites import rewritten
from patchcleanser.classifiers.shared import Pairs, Sharing
from patchcleanser.classifiers.ways import UnusableError
from patchcleanser.core.masks import MaskSet


class Owner:
    """Whoever stands for an image."""


class Residual(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, stride, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.down = nn.Conv2d(width, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.conv2(self.conv1(x).relu()) + self.down(x))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "stem of a ResNet": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 7, 2, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ),
    "padded apart": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 7, 2, 3), nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(3, 2), nn.Conv2d(4, 4, 3, 1, 1)
    ),
    "residual": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), Residual(4), Residual(4, stride=2)),
    "no padding": lambda: nn.Sequential(nn.Conv2d(3, 4, 5, 3), nn.Conv2d(4, 4, 3)),
    "dilated": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 2, 2, dilation=2), nn.AvgPool2d(3, 1, 1)),
    "two axes": lambda: nn.Sequential(nn.Conv2d(3, 4, (1, 5), (2, 1), (0, 2)), nn.SiLU()),
    "open end": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(4, 4, 3, 1, 1)),
    "pixels left out": lambda: nn.Conv2d(3, 4, 1, 3),
    "block of timm": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), timm.models.resnet.BasicBlock(8, 8), nn.AvgPool2d(2)
    ),
    "block of torchvision": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), torchvision.models.mobilenetv2.InvertedResidual(8, 8, 2, 2)
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]().eval().requires_grad_(False)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", [(31, 37), (32, 32)])
def test_an_output_sees_the_pixels_of_its_field_and_no_others(name: str, size: tuple[int, int]) -> None:
    layers = made(name)
    fields = fields_of(layers)
    some = False
    for row, column in [(0, 0), (9, 14), (16, 16), (size[0] - 1, size[1] - 1), (5, size[1] - 2)]:
        image = torch.zeros(1, 3, *size)
        image[..., row, column] = torch.nan
        reached = layers(image).isnan().any(1)[0]
        allowed = torch.zeros_like(reached)
        spans = [f.touched(at, at + 1, n) for f, at, n in zip(fields, (row, column), reached.shape, strict=True)]
        allowed[spans[0][0] : spans[0][1], spans[1][0] : spans[1][1]] = True
        assert not (reached & ~allowed).any()
        some |= bool(reached.any())
    assert some


def shared_by(layers: nn.Module, masks: MaskSet) -> Sharing:
    outputs = layers(torch.zeros(1, 3, *masks.image)).shape[-2:]
    layout = Layout(fields_of(layers), (outputs[0], outputs[1]), masks.image)
    return Sharing(layout, masks, fill=(0.1, 0.2, 0.3), first=lambda stacks: [*map(layers, stacks)], rest=lambda x: x)


def hidden(image: Tensor, masks: MaskSet, union: int) -> Tensor:
    return covered(image[None].clone(), masks.unions.boxes[[union]], (0.1, 0.2, 0.3))[0]


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from([*LAYERS]),
    height=st.integers(24, 70),
    width=st.integers(24, 70),
    patch=st.integers(1, 12),
    count=st.integers(1, 2),
    quantum=st.sampled_from([1, 8, 32]),
)
def test_outputs_put_together_are_those_of_images_masked_as_a_whole(
    name: str, height: int, width: int, patch: int, count: int, quantum: int
) -> None:
    layers = made(name)
    threat = Threat.square(patch, count=count)
    masks = MaskSet.build(threat, image=(height, width), masks=4 if count == 1 else 3)
    images = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    draw = np.random.default_rng(0)
    unions = np.concatenate([[-1], draw.permutation(len(masks.unions))[:40]])
    pairs = Pairs(np.sort(draw.integers(0, 2, len(unions))), unions)
    owners = [Owner(), Owner()]
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patched:
        patched.setattr("patchcleanser.classifiers.fields.QUANTUM", quantum)  # so that crops are small in small images
        found = shared_by(layers, masks).outputs(owners, lambda i: images[i], pairs)
        wanted = layers(torch.stack([hidden(images[i], masks, u) for i, u in zip(*pairs, strict=True)]))
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, atol=1e-5)


class Net(nn.Module):
    """A network that does most of its work in its first layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU())
        self.block, self.head = Residual(16, stride=2), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class AroundIt(Net):
    """Something goes around the first layers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean((1, 2, 3))[:, None] * torch.arange(5.0)


class AroundPart(Net):
    """Something goes around some of the first layers, but not all."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem[1](self.stem[0](x))
        return self.head((self.block(self.stem[3](self.stem[2](first))) + first[..., ::2, ::2]).mean((2, 3)))  # type: ignore[no-any-return]


class Twice(Net):
    """A layer is called again later."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        return self.head(self.block(self.stem[3](self.stem[2](first))).mean((2, 3)))  # type: ignore[no-any-return]


class Bounded(Net):
    """Numbers are bounded in place, which an image without bright places does not show."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem[1](self.stem[0](x))
        first.clamp_(max=100.0)
        return self.head(self.block(self.stem[3](self.stem[2](first))).mean((2, 3)))  # type: ignore[no-any-return]


class BoundedImage(Net):
    """The same of the image itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone().clamp_(-100, 100))


class Deciding(Net):
    """What is in an image decides what is done with it."""

    def forward(self, x: Tensor) -> Tensor:
        bright = x.amax((1, 2, 3)) > 100
        return torch.where(bright[:, None], -1.0, 1.0) * super().forward(x)


class Squeezed(Net):
    """A whole image decides what the first layers give."""

    def __init__(self) -> None:
        super().__init__()
        self.block = timm.layers.SEModule(16)  # type: ignore[assignment]


class Spread(nn.Module):
    """One number for a whole image is added everywhere, though it comes from a layer that slides a window."""

    def __init__(self, side: int = 64) -> None:
        super().__init__()
        self.whole = nn.Conv2d(3, 3, side)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.whole(x)  # type: ignore[no-any-return]


class Overwritten(nn.Module):
    """What is given back was written into, later, from what sees more."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.wide = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 9, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.short(x)
        y.add_(self.wide(x))
        return y  # type: ignore[no-any-return]


def masks_of(side: int = 64) -> MaskSet:
    return MaskSet.build(Threat.square(8), image=(side, side), masks=6)


def photos(number: int, side: int = 64) -> Tensor:
    return torch.rand(number, 3, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("network", "names"),
    [
        (Net, ["stem.0", "stem.1", "stem.2", "stem.3", "block"]),
        (AroundIt, []),
        (Bounded, ["stem.0", "stem.1"]),
        (BoundedImage, []),
        (Deciding, []),
        (AroundPart, ["stem.0", "stem.1"]),
        (Twice, ["stem.0", "stem.1"]),
        (Squeezed, ["stem.0", "stem.1", "stem.2", "stem.3"]),
    ],
)
def test_a_network_in_two_does_what_it_does_in_one(
    network: type[Net], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cuts.WORTH, "cpu", 0.0)
    monkeypatch.setitem(cuts.WRITTEN, "cpu", 0)
    module = network().eval()
    with torch.inference_mode():
        found = cut(module, photos(2), masks_of())
        assert (found is not None) == bool(names)
        if found is None:
            return
        assert torch.allclose(found.rest(found.first(photos(3))), module(photos(3)), atol=1e-5)
        layers = [module.get_submodule(name) for name in names]
        assert [layer.name for layer in first_layers(module, photos(2))] == names
    assert all(one is other for one, other in zip(found.first, layers, strict=False))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())


def test_nothing_is_cut_where_little_would_be_saved_or_somebody_hooked_into_the_network() -> None:
    module = Net().eval()
    with torch.inference_mode():
        assert cut(module, photos(2), masks_of()) is not None
        wide = nn.Sequential(module.stem[0], nn.Flatten(), nn.Linear(16 * 32 * 32, 500)).eval()
        assert cut(wide, photos(2), masks_of()) is None
        module.stem.register_forward_hook(lambda *_: None)
        assert cut(module, photos(2), masks_of()) is None


def test_layers_that_see_more_than_their_code_says_are_found_out() -> None:
    torch.manual_seed(0)
    masks, around = masks_of(), nn.Sequential(Spread(), nn.Conv2d(3, 4, 3, 2, 1)).eval()
    for layers, as_said in ((around, False), (around[1:], True)):
        layout = Layout(fields_of(layers), (32, 32), (64, 64))
        with torch.inference_mode():
            assert sees_no_more(layers, layout, masks, photos(1)) == as_said
            assert shared_by(layers, masks).holds(photos(1)[0]) == as_said


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("resnet18", "layer4.1"),
        ("mobilenetv2_100", "bn2"),
        ("resnetv2_50x1_bit", "stem.pool"),
        ("vit_tiny_patch16_224", "patch_embed.proj"),
    ],
)
def test_the_first_layers_of_known_networks_are_found(name: str, last: str) -> None:
    module = rewritten(timm.create_model(name, pretrained=False).eval()) if "bit" in name else timm.create_model(name)
    with torch.inference_mode():
        assert first_layers(module.eval(), torch.zeros(1, 3, 224, 224))[-1].name == last


def test_a_network_is_cut_before_its_first_squeeze_and_excitation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuts.WORTH, "cpu", 0.0)
    module = timm.create_model("seresnet18", pretrained=False).eval()
    with torch.inference_mode():
        found = cut(module, photos(1, 96), masks_of(96))
    assert found is not None
    assert found.first[-1] is module.maxpool


@pytest.mark.parametrize(
    "layer",
    [
        nn.GroupNorm(1, 3),
        nn.InstanceNorm2d(3),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(3, 3, 3, padding="same"),
        nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"),
        nn.MaxPool2d(2, return_indices=True),
        nn.Upsample(scale_factor=2),
        nn.Flatten(),
        nn.ConstantPad2d((0, -4, 0, -4), 0.0),
        Squeezed().block,
        Overwritten(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_look_at_more_than_a_window_or_are_not_known_are_not_local(layer: nn.Module) -> None:
    with pytest.raises(NotLocalError):
        fields_of(nn.Sequential(nn.Conv2d(3, 3, 3), layer))


def test_sums_of_outputs_that_lie_apart_otherwise_are_not_local() -> None:
    with pytest.raises(NotLocalError, match="1 and 2 px apart"):
        Field().joined(Field(step=2))


@pytest.fixture
def no_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.classifiers.fast.half_type", lambda device: None)


@pytest.mark.parametrize("grid", ["input", "source"])
def test_labels_of_shared_layers_are_the_exact_ones(no_half: None, grid: str) -> None:
    pytest.importorskip("onnxscript")
    tables = {}
    for precision in ("fast", "exact"):
        classifier = TorchClassifier(Net().eval(), classes=5)
        defense = DoubleMasking(classifier, Threat.square(8, grid=grid), masks=4, precision=precision)  # type: ignore[arg-type]
        found = defense.examine(photos(9), [0] * 9, maps=True)
        tables[precision] = np.stack([e.table.labels for e in found]), np.stack([e.table.margins for e in found])
        if precision == "fast":
            assert isinstance(defense.masked.way, Exported)
            (sharing,) = defense.masked.way._sharings.values()
            assert sharing is not None
            assert not defense.masked.way._sessions  # the network as a whole was never needed
            assert defense.masked.recheck.labels > defense.masked.recheck.rechecked
    assert (tables["fast"][0] == tables["exact"][0]).all()
    assert np.allclose(tables["fast"][1], tables["exact"][1], atol=1e-5)


def test_a_half_precision_copy_shares_its_first_layers_but_not_for_few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Copied(TorchClassifier(Net().eval(), classes=5))
    masks, owners, images = masks_of(), [Owner()], photos(1)
    unions = np.arange(100)
    with torch.inference_mode():
        assert way.sharing(masks, (3, 64, 64), 64) is None
        sharing = way.sharing(masks, (3, 64, 64), 65)
        assert sharing is not None
        found = sharing.logits(owners, lambda i: images[i], Pairs(np.zeros_like(unions), unions))
        inputs = torch.stack([covered(images.clone(), masks.unions.boxes[[u]], (0.5,) * 3)[0] for u in unions])
        wanted = way.logits(inputs)
        with way.unshared():
            assert way.sharing(masks, (3, 64, 64), 65) is None
    assert (found - wanted).abs().max() < 20 * way.resolution * wanted.abs().max()


def test_nothing_is_shared_by_a_network_that_changed(no_half: None) -> None:
    pytest.importorskip("onnxscript")
    module = Net().eval()
    way = Exported(TorchClassifier(module, classes=5))
    assert way.sharing(masks_of(), (3, 64, 64), 40) is not None
    with torch.no_grad():
        module.stem[0].weight.mul_(2)
    with pytest.raises(UnusableError, match="changed"):
        way.sharing(masks_of(), (3, 64, 64), 40)
    way.renew()
    assert not way._sharings
    assert way.sharing(masks_of(), (3, 64, 64), 40) is not None


def test_what_was_computed_of_an_image_is_kept_while_it_is_needed_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks, images = masks_of(), photos(3)
    layers = made("residual")
    ran: list[int] = []

    def first(stacks: list[Tensor]) -> list[Tensor]:
        ran.append(sum(map(len, stacks)))
        return [*map(layers, stacks)]

    sharing = shared_by(layers, masks)
    sharing.first = first
    owners = [Owner(), Owner(), Owner()]
    unions = enumerate(masks.unions.masks)
    far = next(u for u, mask in unions if len(mask) == 2 and not sharing.layout.between(mask))

    def ask(which: int) -> None:
        sharing.outputs(owners, lambda i: images[i], Pairs(np.array([which]), np.array([far])))

    for which in (0, 0, 1, 0):
        ask(which)
    assert ran[1:] == [37, 37]  # the image and around its 36 masks, once for each image, after a look at sizes
    assert len(sharing._known) == 2
    del owners[1:]
    owners += [Owner(), Owner()]
    gc.collect()
    assert len(sharing._known) == 1
    monkeypatch.setitem(shared.KEPT, "cpu", 0)
    for which in (0, 2):
        ask(which)
    assert len(sharing._known) == 1  # never more than there is room for, beside what is being worked on


def test_sets_of_very_many_unions_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "PLACES", 100)
    with torch.inference_mode():
        assert cut(Net().eval(), photos(2), masks_of()) is None


def subject_of(defense: DoubleMasking, side: int = 64) -> Subject:
    return defense.subject(photos(1, side)[0])


def piece_of(*subjects: Subject) -> Piece:
    unions = np.arange(100)
    return Piece(list(subjects), unions % len(subjects), unions)


class TwiceAsSure(TorchClassifier):
    def logits(self, inputs: Tensor) -> Tensor:
        return 2 * super().logits(inputs)


class MaskAware(Net):
    mask_aware, steady = True, True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :3])


def test_only_pairs_whose_masks_hide_pixels_of_a_plain_networks_input_share_anything() -> None:
    def shares(classifier: TorchClassifier, grid: str = "source", *sides: int) -> bool:
        defense = DoubleMasking(classifier, Threat.square(8, grid=grid), masks=4)  # type: ignore[arg-type]
        other = DoubleMasking(classifier, Threat.square(8, grid=grid), masks=5)  # type: ignore[arg-type]
        subjects = [subject_of(defense, 64), *(subject_of(other, side) for side in sides)]
        with torch.inference_mode():
            return defense.masked._sharing(piece_of(*subjects), Copied(classifier)) is not None

    plain = TorchClassifier(Net().eval(), classes=5)
    resized = TorchClassifier(Net().eval(), Preprocessing(resize=(48, 48)), classes=5)
    assert shares(plain)
    assert shares(resized, "input")
    assert not shares(resized)  # a mask's edge is then no edge of the input's pixels
    assert not shares(plain, "source", 64)  # the second image has other masks
    assert not shares(TwiceAsSure(Net().eval(), classes=5))
    assert not shares(TorchClassifier(MaskAware().eval(), classes=5))


def test_where_there_is_no_room_for_what_is_shared_labels_are_still_the_exact_ones(
    no_half: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    fast, exact = (
        DoubleMasking(TorchClassifier(Net().eval(), classes=5), Threat.square(8), masks=4, precision=precision)  # type: ignore[arg-type]
        for precision in ("fast", "exact")
    )
    fast.calibrate(photos(9))
    way = fast.masked.way
    assert isinstance(way, Exported)
    (sharing,) = way._sharings.values()
    assert sharing is not None

    def no_room(stacks: list[Tensor]) -> list[Tensor]:
        raise MemoryError

    monkeypatch.setattr(sharing, "first", no_room)
    assert fast.predict(photos(9)) == exact.predict(photos(9))
    fast.calibrate(photos(9))  # and then go on without
    assert fast.masked.recheck.ready
    assert fast.predict(photos(9)) == exact.predict(photos(9))
    assert way._sessions
