"""What only a CUDA device can show; run with `make test-gpu`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch

from engine.small_networks import float8_weights
from gpu.always_float8 import AlwaysFloat8
from patchcleanser import DoubleMasking, Threat, TorchClassifier, load_dataset
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.data import in_memory
from patchcleanser.defenses.one_pass import OnePass
from patchcleanser.engine.fast.backends import UnusableError
from patchcleanser.engine.fast.float8.backend import Float8Backend
from patchcleanser.engine.fast.float8.layers import (
    Float8Block,
    Float8ResBlock,
    has_triton_kernels,
    split_mlps,
    to_float8,
)
from patchcleanser.engine.fast.half import Graph, HalfPrecisionBackend, to_half
from patchcleanser.networks.builders import build_network
from patchcleanser.networks.flip_ensemble import Mirrored
from patchcleanser.networks.inpainting import Inpainting
from patchcleanser.networks.visible_pooling import VisibleFeatures
from patchcleanser.training import RECIPES, fit
from patchcleanser.training.training_state import MIN_COMPILED_STEPS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def vit() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10).eval()  # type: ignore[no-any-return]


def test_cuda_labels_equal_cpu_labels_where_the_margin_is_not_tiny() -> None:
    images = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    tables = []
    for device in ("cpu", "cuda"):
        defense = DoubleMasking(TorchClassifier(vit().to(device)), Threat.square(32), masks=3)
        groups = list(defense._groups(images))
        from patchcleanser.engine.masking import LabelRequest

        defense.engine.compute([LabelRequest(s, s.table.rows(range(9))) for s in groups[0]])
        tables.append([s.table for s in groups[0]])
    for cpu, cuda in zip(*tables, strict=True):
        clear = cpu.margins[:-1] > 1e-3
        assert clear.mean() > 0.5
        assert (cpu.labels[:-1] == cuda.labels[:-1])[clear].all()


def test_features_of_a_trunk_have_the_bits_of_the_cpu_and_labels_with_a_head_those_of_any_batch() -> None:
    torch.manual_seed(0)
    module = VisibleFeatures(build_network("split", {"width": 32, "depth": 3, "head": 2, "head_width": 32})).eval()
    images = torch.rand(40, 3, 32, 32)
    with torch.inference_mode():
        on_cpu = module.features(images)
        assert torch.equal(on_cpu, module.cuda().features(images.cuda()).cpu())
    defense = OnePass(TorchClassifier(module, Preprocessing(), classes=10), Threat.square(5))
    together = defense.examine(images, [0] * 40, maps=True)
    (alone,) = OnePass(defense.classifier, defense.threat).examine(images[7:8], [0], maps=True)
    assert (alone.table.margins[:-1] == together[7].table.margins[:-1]).all()


def test_real_out_of_memory_makes_batches_smaller_and_loses_nothing() -> None:
    defense = DoubleMasking(TorchClassifier(vit().cuda()), Threat.square(32), masks=6)
    defense.predict(torch.rand(1, 3, 224, 224))  # reserves what kernels work in
    assert defense.engine.exact.max_rows is None
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 40e6) / total)
    try:
        (certificate,) = defense.certify(torch.rand(1, 3, 224, 224), [0], maps=True)
        assert certificate.classifications == 666
        assert defense.engine.exact.max_rows is not None
        assert defense.engine.exact.max_rows < 18
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def labels_of(defense: DoubleMasking, images: torch.Tensor) -> torch.Tensor:
    examined = defense.examine(images, [0] * len(images), maps=True)
    return torch.stack([torch.from_numpy(e.table.labels) for e in examined])


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "resmlp_12_224", "resnet18", "inpaint:resnet18", "mirror:resnet18"]
)
@pytest.mark.parametrize("expected", [0, 10**9], ids=["few labels", "many labels"])
def test_fast_labels_are_the_exact_ones_compiled_or_not(name: str, expected: int) -> None:
    torch.manual_seed(0)
    around, _, network = name.rpartition(":")
    module = timm.create_model(network, pretrained=False, num_classes=10).eval().cuda()
    torch.nn.init.normal_(module.get_classifier().weight, std=0.02)  # zeros would make every label a tie
    module = {"inpaint": Inpainting, "mirror": Mirrored}[around](module).eval() if around else module
    images = torch.rand(8, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    fast, exact = (
        DoubleMasking(TorchClassifier(module), Threat.square(32), masks=6, precision=precision)
        for precision in ("fast", "exact")
    )
    fast.engine.hint_total_labels(expected)
    assert (labels_of(fast, images) == labels_of(exact, images)).all()
    first, *_ = backends = [stage.backend for stage in fast.engine.calibration.stages]
    float8 = isinstance(first, Float8Backend)  # for ResMLPs, if many labels are expected
    assert not float8 or expected > 0
    half = backends[1 if float8 else 0]
    assert isinstance(half, HalfPrecisionBackend)
    assert half.counts["blocks"] > 0
    assert float8 or half.counts["compiled_blocks"] == (half.counts["blocks"] if expected > 0 else 0)


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "resmlp_12_224"])
def test_labels_that_begin_with_fp8_are_the_exact_ones(name: str) -> None:
    torch.manual_seed(0)
    module = timm.create_model(name, pretrained=False, num_classes=10).eval().cuda()
    torch.nn.init.normal_(module.get_classifier().weight, std=0.02)
    photos = load_dataset("sample")
    images = torch.nn.functional.interpolate(torch.stack([photos.image(i) for i in range(16)]), size=(224, 224))
    fast, exact = (
        DoubleMasking(TorchClassifier(module), Threat.square(32), masks=6, precision=precision)
        for precision in ("fast", "exact")
    )
    half = HalfPrecisionBackend(fast.classifier)  # type: ignore[arg-type]
    fast.engine.candidates = [[AlwaysFloat8(fast.classifier, half), half], [half]]  # type: ignore[arg-type]
    fast.engine.hint_total_labels(10**9)
    assert (labels_of(fast, images) == labels_of(exact, images)).all()
    assert isinstance(fast.engine.calibration.stages[0].backend, AlwaysFloat8)
    assert fast.engine.stats.settled["HalfPrecisionBackend"] > 0 or name.startswith(
        "resmlp"
    )  # its blocks do next to nothing at first
    with torch.inference_mode():  # a label does not depend on what else is in its block
        inputs = images.cuda()
        answers = [
            fast.engine.calibration.stages[0].backend.logits(inputs[at])[0]
            for at in (slice(None), slice(0, 1), slice(0, 5))
        ]
    assert all((answer - answers[0]).abs().max() < 1e-2 * answers[0].abs().max() for answer in answers)


def test_single_predictions_are_replayed_from_a_graph_and_stay_those_of_the_image() -> None:
    images = torch.rand(16, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    fast, exact = (
        DoubleMasking(TorchClassifier(vit().cuda()), Threat.square(32), masks=6, precision=precision)
        for precision in ("fast", "exact")
    )
    fast.calibrate(images)
    assert [fast.predict(image[None])[0].label for image in images] == [v.label for v in exact.predict(images)]
    assert isinstance(fast.engine.calibration.stages[0].backend, HalfPrecisionBackend)
    assert fast.engine.calibration.stages[0].backend.counts["graphs"] > 0


def test_a_changed_network_is_noticed_while_its_graph_is_replayed_and_built_again_at_once() -> None:
    module = vit().cuda()
    backend = HalfPrecisionBackend(TorchClassifier(module, classes=10))
    image = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(1)).cuda()
    with torch.inference_mode():
        before = [backend.logits(image) for _ in range(6)][-1]
    assert backend.counts["graphs"] > 0
    with torch.no_grad():
        module.head.bias += 1
    with torch.inference_mode():
        with pytest.raises(UnusableError, match="changed"):
            backend.logits(image)
        backend.refresh()
        assert (backend.logits(image) - before - 1).abs().max() < 0.1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_graph_is_recorded_on_the_networks_device_not_the_current_one() -> None:
    backend = HalfPrecisionBackend(TorchClassifier(vit().to("cuda:1"), classes=10))
    images = torch.rand(16, 3, 224, 224, generator=torch.Generator().manual_seed(1)).to("cuda:1")
    with torch.inference_mode():
        replayed = torch.cat([backend.logits(image[None]) for image in images])
        assert backend.counts["graphs"] > 0
        assert (replayed - backend.logits(images)).abs().max() < 0.05 * replayed.abs().max()


def test_a_graph_that_writes_nothing_never_repeats_an_old_answer() -> None:
    with torch.inference_mode():
        graph = Graph(TorchClassifier(vit().cuda().half(), classes=10), torch.rand(1, 3, 224, 224, device="cuda"))
    assert graph._outputs.isnan().all()  # before it is replayed


def test_a_bagnet_learns_without_its_best_window_when_compiled(tmp_path: Path) -> None:
    images = in_memory(load_dataset("sample"), (32, 32))
    recipe = replace(RECIPES["patchguard-cifar"], epochs=40, batch=50, window=4, shift=0, ema=0.0)
    assert recipe.epochs * len(images) // recipe.batch >= MIN_COMPILED_STEPS  # enough steps to be compiled
    torch.manual_seed(0)
    network = build_network("bagnet", {"field": 5, "stride": 2, "width": 64, "depth": 4}).cuda()
    fitted = fit(network, images, recipe, preprocessing=Preprocessing(mean=(0.5,) * 3, std=(0.25,) * 3), out=tmp_path)
    assert fitted.history[-1].accuracy > fitted.history[0].accuracy + 0.2


def test_labels_read_during_the_next_batch_are_those_of_their_own_batch() -> None:
    """Many small batches, each launched before the last one is read."""
    network = build_network("resnet", {"channels": (16, 24, 32, 40), "layers": (1, 1, 1, 1)}).eval().cuda()
    images = torch.rand(24, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    labels = []
    for prefetch in (1, 0):
        defense = DoubleMasking(TorchClassifier(network), Threat.square(5), masks=4, chunk=16, precision="fast")
        defense.engine.prefetch = prefetch
        labels.append(labels_of(defense, images))
    assert torch.equal(labels[0], labels[1])


def test_a_network_that_writes_into_its_inputs_gets_each_block_once() -> None:
    class Writing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.network = build_network("resnet", {"channels": (16, 24, 32, 40), "layers": (1, 1, 1, 1)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.network(x.sub_(0.5).mul_(4.0))  # type: ignore[no-any-return]

    backend = HalfPrecisionBackend(TorchClassifier(Writing().eval().cuda()))
    inputs = torch.rand(8192, 3, 32, 32, device="cuda").half().contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        few = torch.cat([backend.logits(part.clone()) for part in inputs[:256].split(64)])
        many = backend.logits(inputs.clone())[:256]
    assert torch.allclose(few, many, atol=0.02 * float(few.abs().max()))


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "resmlp_12_224"])
def test_triton_kernels_compute_what_the_layers_they_replace_do_and_nan_for_what_is_too_large(name: str) -> None:
    torch.manual_seed(0)
    module = timm.create_model(name, pretrained=False, num_classes=10).eval().cuda()
    inputs = torch.randn(5, 3, 224, 224, device="cuda").half()
    with torch.inference_mode():
        module = split_mlps(to_half(module))
        weights = float8_weights(module, inputs)
        module = to_float8(module, weights, triton=has_triton_kernels(inputs.device))
        (block, *_) = (part for part in module.modules() if isinstance(part, (Float8Block, Float8ResBlock)))
        if not block.mlp.triton:
            pytest.skip("our Triton kernels are for other GPUs")
        given = [torch.randn(5, 197, 384, device="cuda").half() for _ in range(2)] + [torch.ones(384).half().cuda()]
        if isinstance(block, Float8ResBlock):
            given = [module.stem(inputs)]
            block.ls2.fill_(1.0), block.scale.fill_(0.5)  # next to nothing at first
        block.mlp.second.input_scale *= 12  # then some hidden numbers are too large for FP8, with both kernels
        answers = []
        for triton in (True, False):
            block.triton = block.mlp.triton = triton
            outputs = block(*given)
            answers.append(outputs.float() if isinstance(outputs, torch.Tensor) else torch.stack(outputs[:2]).float())
    ours, wanted = answers
    finite = ~(ours.isnan() | wanted.isnan())
    assert 0.01 < finite.float().mean() < 0.99
    assert (ours.isnan() != wanted.isnan()).float().mean() < 0.03  # at the very limit it may be either
    assert (ours - wanted)[finite].square().mean().sqrt() < 0.05 * wanted[finite].std()


def test_images_of_a_batch_fill_each_others_exact_batches() -> None:
    images = torch.rand(60, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    linear = torch.nn.Linear(3072, 10)
    torch.nn.init.constant_(linear.bias[3:4], 10.0)  # all masks agree
    classifier = TorchClassifier(torch.nn.Sequential(torch.nn.Flatten(), linear).cuda().eval())
    defense = DoubleMasking(classifier, Threat.square(5), masks=6)
    verdicts = defense.predict(images)
    assert defense.engine.exact.batch_rows(defense.image_state(images[0])) == 144
    assert defense.engine.exact.padding < 60 * (144 - 36) / 2  # one batch for each image would pad 108 rows
    alone = [DoubleMasking(classifier, Threat.square(5), masks=6).predict(image[None])[0] for image in images[:8]]
    assert [verdict.label for verdict in alone] == [verdict.label for verdict in verdicts[:8]] == [3] * 8
