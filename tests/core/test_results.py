"""Verdicts and certificates in print, compared, stored and drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.colors import to_rgb
from PIL import Image

from patchcleanser import (
    CallableClassifier,
    Case,
    Certificate,
    ChallengerMasking,
    DoubleMasking,
    MinorityReports,
    Threat,
    Verdict,
    Window,
)
from patchcleanser.core.hiding import ObjectCertificate
from patchcleanser.core.multilabel import MultiLabelCertificate, MultiLabelVerdict
from patchcleanser.core.plots import WEAK
from patchcleanser.core.results import DetectionCertificate, DetectionVerdict, LocalCertificate, LocalVerdict, Result
from patchcleanser.errors import ImageError

SAFE = np.ones((4, 6), dtype=bool)
SAFE[1, 2] = False
MAPPED = Certificate(1, False, False, (0, 1), (Window(1, 2, 3, 3),), 0.123456, 45, {(3, 3): SAFE})
CERTIFIED = Certificate(1, True, True, None, None, 0.5, 45, None)
VERDICT = Verdict(3, Case.DISAGREER, (3,) * 36, (0, 1), 7, 71, (Window(0, 0, 2, 3),))
RESULTS: list[Result] = [
    VERDICT,
    MAPPED,
    CERTIFIED,
    LocalVerdict(2, 9),
    LocalCertificate(2, False, (Window(0, 0, 2, 2),), -np.inf, 9),
    DetectionVerdict(2, True, (2,) * 36, (0, 5), 37, (Window(0, 0, 2, 2),)),
    DetectionCertificate(2, False, 4, float("nan"), 37),
    ObjectCertificate(2, 0.0, None, 0.5, {"over": Window(0, 0, 2, 2), "far": Window(4, 4, 2, 2)}),
]
SEVERAL_LABELS: list[Result] = [
    MultiLabelVerdict((1,), (Case.AGREED,) * 3, 9),
    MultiLabelCertificate((1,), (), (2,), 0, 1, (Window(0, 0, 2, 2),), np.inf, 9, {(3, 3): SAFE.astype(np.int64)}),
]
IMAGE = torch.rand(3, 6, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    pyplot.close("all")


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_results_print_on_one_short_line(result: Result) -> None:
    assert len(repr(result)) < 140
    assert "\n" not in repr(result)


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_no_result_passes_for_true(result: Result) -> None:
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(result)


def test_a_repr_names_what_matters() -> None:
    assert repr(VERDICT) == "Verdict(label=3, case=disagreer, deciding_mask=7, classifications=71)"
    assert repr(replace(CERTIFIED, unconfirmed=7)).endswith("classifications=45, statistical: 7 labels unconfirmed)")
    assert repr(CERTIFIED) == "Certificate(label=1, certified=True, row_certified=True, margin=0.5, classifications=45)"


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_results_are_dicts_that_strict_json_takes(result: Any) -> None:
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert content == result.to_dict()
    assert content["label"] == result.label


@pytest.mark.parametrize("result", SEVERAL_LABELS, ids=lambda result: type(result).__name__)
def test_results_of_several_labels_are_dicts_that_strict_json_takes(result: Any) -> None:
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert content == result.to_dict()
    assert content["present"] == [1]


def test_every_class_of_results_is_in_these_tests() -> None:
    in_core = {kind for kind in Result.__subclasses__() if kind.__module__.startswith("patchcleanser.core")}
    assert {type(result) for result in RESULTS + SEVERAL_LABELS} == in_core


def test_dicts_hold_windows_maps_and_cases_as_plain_values() -> None:
    assert VERDICT.to_dict()["case"] == "disagreer"
    assert VERDICT.to_dict()["suspected"] == [[0, 0, 2, 3]]
    assert MAPPED.to_dict()["failing_placement"] == [[1, 2, 3, 3]]
    assert MAPPED.to_dict()["positions"]["3x3"][1] == [True, True, False, True, True, True]


def test_certificates_with_equal_maps_are_equal_and_have_one_hash() -> None:
    same = replace(MAPPED, positions={(3, 3): SAFE.copy()})
    assert same == MAPPED
    assert hash(same) == hash(MAPPED)
    assert replace(MAPPED, positions={(3, 3): ~SAFE}) != MAPPED
    assert replace(MAPPED, positions=None) != MAPPED
    assert replace(MAPPED, label=2) != MAPPED
    assert MAPPED != 3
    assert len({VERDICT, replace(VERDICT, label=4), replace(VERDICT)}) == 2


def weak_pixels(result: Result, image: Any = IMAGE) -> set[tuple[int, int]]:
    """The pixels that a plot shades."""
    pixels, shade = result.plot(image).images
    assert to_rgb(WEAK) == tuple(np.asarray(shade.get_array())[0, 0, :3])
    assert pixels.get_array().shape == (6, 8, 3)
    return {(int(row), int(column)) for row, column in np.argwhere(np.asarray(shade.get_array())[..., 3] > 0)}


def test_a_map_shades_the_centres_of_patches_without_a_proof() -> None:
    assert weak_pixels(MAPPED) == {(2, 3)}
    assert weak_pixels(replace(MAPPED, positions={(3, 3): ~SAFE})) == {
        (r, c) for r in range(1, 5) for c in range(1, 7)
    } - {(2, 3)}


def test_a_map_of_a_region_is_drawn_where_the_region_lies() -> None:
    safe = np.zeros((1, 2), dtype=bool)
    certificate = replace(MAPPED, positions={(2, 2): safe}, region=Window(3, 4, 2, 3))
    assert weak_pixels(certificate) == {(3, 4), (3, 5)}


def wrapped(function: Any) -> CallableClassifier:
    return CallableClassifier(function, array="torch")


def test_a_live_map_shades_exactly_the_places_where_some_shape_fails() -> None:
    def brightness(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.mean((1, 2, 3)), 0.75 - x.mean((1, 2, 3))], 1)

    image = torch.zeros(3, 6, 8)
    image[:, :2, :3] = 1
    image[:, 2:] = 0.45
    (certificate,) = DoubleMasking(wrapped(brightness), "any:4", masks=3).certify([image], [0], maps=True)
    assert certificate.positions is not None
    expected = {
        (row + (height - 1) // 2, column + (width - 1) // 2)
        for (height, width), safe in certificate.positions.items()
        for row, column in np.argwhere(~safe)
    }
    assert weak_pixels(certificate, image) == expected


@pytest.mark.parametrize("defense", [DoubleMasking, ChallengerMasking, MinorityReports])
def test_verdicts_frame_the_masks_that_decided(defense: Any) -> None:
    def corner(x: torch.Tensor) -> torch.Tensor:
        """Class 1 where the corner is bright, else 0, confidently."""
        bright = 40 * (x[:, 0, 0, 0] - 0.75)
        return torch.stack([-bright, bright], 1)

    image = torch.full((3, 8, 8), 0.5)
    image[:, 0, 0] = 1
    defended = defense(wrapped(corner), Threat.square(2), masks=3)
    (verdict,) = defended.predict([image])
    mask = verdict.reporters[0] if defense is MinorityReports else verdict.deciding_mask
    windows = defended.mask_set((8, 8)).masks[mask]
    assert verdict.suspected == windows
    frames = {frame.get_bbox().bounds for frame in verdict.plot(image).patches}  # type: ignore[attr-defined]
    assert frames == {(w.left - 0.5, w.top - 0.5, w.width, w.height) for w in windows}


def test_without_a_map_the_failing_patch_is_hatched() -> None:
    (frame,) = replace(MAPPED, positions=None).plot(IMAGE).patches
    assert frame.get_bbox().bounds == (1.5, 0.5, 3, 3)  # type: ignore[attr-defined]
    assert frame.get_hatch()


TITLES = {
    "label 3, dashed: the mask that decided": VERDICT,
    "label 3, all masks agree": replace(VERDICT, case=Case.AGREED, deciding_mask=None, suspected=()),
    "label 3, all coarse masks agree": replace(VERDICT, case=Case.COARSE, deciding_mask=None, suspected=()),
    "label 3, most masks agree": replace(VERDICT, case=Case.MAJORITY, deciding_mask=None, suspected=()),
    "label 1, certified": CERTIFIED,
    "label 1, row-certified": replace(CERTIFIED, certified=False),
    "label 1, not certified\na map of all places needs maps=True": replace(MAPPED, positions=None),
    "label 1, 95.8% of places proved\npink: patch centres that are not": MAPPED,
    "label 2": RESULTS[3],
    "alert": RESULTS[5],
    "label 2, not certified": RESULTS[6],
    "label 2, detection-certified": DetectionCertificate(2, True, None, 1.0, 37),
    "classes 0 2": MultiLabelVerdict((0, 2), (Case.AGREED,) * 3, 9),
    "classes -": MultiLabelVerdict((), (Case.AGREED,) * 3, 9),
    "classes 0 2, 1 certified": MultiLabelCertificate((0, 2), (0,), (), 1, 0, None, 0.5, 666),
    "label 4": ObjectCertificate(4, 0.0, 0.2, 0.9, {}),  # whether it is certified depends on the place
}


@pytest.mark.parametrize(("title", "result"), TITLES.items(), ids=TITLES)
def test_titles_say_the_label_and_what_is_proved(title: str, result: Result) -> None:
    figure, axes = pyplot.subplots()
    assert result.plot(IMAGE, ax=axes) is axes
    assert axes.get_title() == title
    assert figure.axes == [axes]


PICTURE = Image.fromarray((IMAGE.permute(1, 2, 0) * 255).byte().numpy())
IMAGES = {
    "tensor": IMAGE,
    "array": IMAGE.numpy(),
    "channels last": IMAGE.permute(1, 2, 0).numpy(),
    "bytes": np.asarray(PICTURE),
    "picture": PICTURE,
}


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_images_are_drawn_however_they_come(image: Any) -> None:
    shown = np.asarray(CERTIFIED.plot(image).images[0].get_array())
    np.testing.assert_allclose(shown, IMAGE.permute(1, 2, 0).numpy(), atol=1 / 255)


@pytest.mark.parametrize("image", [torch.rand(3, 9, 9), torch.rand(2, 3, 6, 8), None, torch.rand(6, 8)])
def test_an_image_that_does_not_fit_is_refused(image: Any) -> None:
    with pytest.raises(ImageError):
        MAPPED.plot(image)


@pytest.mark.parametrize("result", [VERDICT, replace(MAPPED, positions=None)], ids=["verdict", "certificate"])
def test_a_result_of_another_image_size_is_not_drawn_outside_the_image(result: Result) -> None:
    with pytest.raises(ImageError, match=r"outside this image of 2×2 px; .*preprocessing\.geometry"):
        result.plot(IMAGE[:, :2, :2])
