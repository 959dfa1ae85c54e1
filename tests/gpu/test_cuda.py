"""What only a CUDA device can show; run with `make test-gpu` and recorded in docs/testing.md."""

from __future__ import annotations

import pytest
import timm
import torch

from patchcleanser import DoubleMasking, Threat, TorchClassifier

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
        from patchcleanser.classifiers.masked import Request

        defense.masked.fill_in([Request(s, s.table.rows(range(9))) for s in groups[0]])
        tables.append([s.table for s in groups[0]])
    for cpu, cuda in zip(*tables, strict=True):
        sure = cpu.margins[:-1] > 1e-3
        assert sure.mean() > 0.5
        assert (cpu.labels[:-1] == cuda.labels[:-1])[sure].all()


def test_real_out_of_memory_makes_chunks_smaller_and_loses_nothing() -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(400e6 / total)
    try:
        defense = DoubleMasking(TorchClassifier(vit().cuda()), Threat.square(32), masks=6, chunk=4096)
        (certificate,) = defense.certify(torch.rand(1, 3, 224, 224), [0], maps=True)
        assert certificate.classifications == 666
        assert defense.masked.chunk is not None
        assert defense.masked.chunk < 666
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
