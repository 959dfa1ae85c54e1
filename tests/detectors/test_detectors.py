"""Adapters of detectors, on networks whose output is chosen here."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchcleanser import Threat
from patchcleanser.core.detections import Detections
from patchcleanser.defenses.object_seeker import FILL, ObjectSeeker, hidden
from patchcleanser.detectors import Detector, load_detector
from patchcleanser.detectors.torchvision_detectors import ModuleDetector
from patchcleanser.detectors.yolox import YoloxDetector
from patchcleanser.errors import (
    ClassifierError,
    ImageError,
    InputError,
    LabelError,
    MaskError,
    NotAFunctionError,
    OutputError,
    ThreatError,
    TrainModeError,
)
from patchcleanser.evaluation.detect_jobs import DetectJob

CELLS = 16 + 4 + 1
"""Of a 32×32 input, on grids of 8, 16 and 32 px."""


class Cells(nn.Module):
    """A YOLOX head that shows one object, as sure as the red channel's mean at the upper left corner of its input."""

    def __init__(self, cell: int, values: tuple[float, float, float, float], label: int) -> None:
        super().__init__()
        cells = torch.zeros(1, CELLS, 85)
        cells[0, cell, :4] = torch.tensor(values)
        cells[0, cell, 5 + label] = 1
        sure = torch.zeros(1, CELLS, 85)
        sure[0, cell, 4] = 1
        self.register_buffer("cells", cells)
        self.register_buffer("sure", sure)

    def forward(self, images: Tensor) -> Tensor:
        red = images[:, 2:, :4, :4].mean() / 255  # BGR
        return self.cells + self.sure * red


def exported(path: Path, *head: object) -> Path:
    torch.onnx.export(Cells(*head), (torch.zeros(1, 3, 32, 32),), path, dynamo=False)  # type: ignore[arg-type]
    return path


def red_picture(height: int, width: int) -> Tensor:
    picture = torch.zeros(3, height, width)
    picture[0] = 0.9
    return picture


def test_a_yolox_box_is_decoded_into_the_pixels_of_the_picture(tmp_path: Path) -> None:
    # Cell 6 of the finest grid is row 1, column 2: its corner is (2, 1) · 8 px, and the box is e^0.5 · 8 px wide.
    path = exported(tmp_path / "net.onnx", 6, (0.5, 0.25, 0.5, 0.0), 16)
    detections = load_detector(f"yolox:{path}", device="cpu")(red_picture(64, 48))
    half = 8 * np.exp(0.5) / 2
    expected = 2 * np.array([20 - half, 10 - 4, 20 + half, 10 + 4])  # the picture was halved
    assert np.allclose(detections.boxes, [expected], atol=1e-4)
    assert (detections.classes.tolist(), detections.scores.round(3).tolist()) == ([16], [0.9])


def test_a_yolox_score_below_the_least_one_gives_no_box(tmp_path: Path) -> None:
    path = exported(tmp_path / "net.onnx", 20, (0.5, 0.5, 0.0, 0.0), 0)
    assert len(load_detector(f"yolox:{path}?score=0.95", device="cpu")(red_picture(32, 32))) == 0


def test_settings_of_a_detector_are_part_of_its_fingerprint(tmp_path: Path) -> None:
    path = exported(tmp_path / "net.onnx", 0, (0.0, 0.0, 0.0, 0.0), 0)
    first, second, third = (load_detector(f"yolox:{path}{more}", device="cpu") for more in ("", "", "?score=0.2"))
    assert first.fingerprint == second.fingerprint != third.fingerprint
    assert isinstance(first, Detector)


def test_an_onnx_file_of_another_network_is_refused(tmp_path: Path) -> None:
    class Flat(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.flatten(1)

    torch.onnx.export(Flat(), (torch.zeros(1, 3, 30, 30),), tmp_path / "flat.onnx", dynamo=False)
    with pytest.raises(ClassifierError, match="sides divisible by 32"):
        YoloxDetector(tmp_path / "flat.onnx")


@pytest.mark.parametrize(
    ("spec", "words"),
    [("yolo:net.onnx", "did you mean yolox"), ("yolox:", "cannot read"), ("yolox:no.onnx", "no ONNX file")],
)
def test_a_wrong_name_of_a_detector_is_refused(spec: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_detector(spec, device="cpu")


def test_a_torchvision_detector_by_name_is_a_function_of_the_image() -> None:
    torch.manual_seed(0)
    detector = load_detector("torchvision:ssdlite320_mobilenet_v3_large?weights=none", device="cpu")
    picture = torch.rand(3, 64, 80, generator=torch.Generator().manual_seed(1))
    first, second = detector(picture), detector(picture)
    assert first.boxes.tolist() == second.boxes.tolist()
    assert detector.classes[1] == "person"


class OneBox(nn.Module):
    """torchvision's layout; the object is there if the picture's first pixel is bright."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        number = int(images[0][0, 0, 0] > 0.8)
        box = torch.tensor([[2.0, 2.0, 6.0, 6.0]])[:number]
        return [{"boxes": box, "labels": torch.ones(number, dtype=torch.int64), "scores": torch.full((number,), 0.9)}]


def test_a_module_in_train_mode_is_refused() -> None:
    with pytest.raises(TrainModeError, match="train mode"):
        ModuleDetector(OneBox(), ("background", "thing"))


def test_a_module_that_returns_no_boxes_is_refused() -> None:
    detector = ModuleDetector(nn.Identity().eval(), ("thing",))
    with pytest.raises(OutputError, match="boxes, labels and scores"):
        detector(torch.zeros(3, 4, 4))


def seeker(threat: str = "2", **options: object) -> ObjectSeeker:
    return ObjectSeeker(ModuleDetector(OneBox().eval(), ("background", "thing")), threat, **options)  # type: ignore[arg-type]


def test_an_object_hidden_without_masks_is_in_the_answer_if_some_masked_image_shows_it() -> None:
    class Dazzled(OneBox):
        """Does not see the object beside a dark pixel in the last row."""

        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            (output,) = super().forward(images)
            return [{n: v[:0] for n, v in output.items()}] if images[0][0, -1, -1] == 0 else [output]

    defense = ObjectSeeker(ModuleDetector(Dazzled().eval(), ("background", "thing")), "2", masks=3)
    picture = torch.ones(3, 10, 10)
    (certificate,) = defense.certify(picture, [[2, 2, 6, 6]], [1])
    assert certificate.certified("far", 0.7)
    picture[:, -1, -1] = 0
    assert len(defense.detector(picture)) == 0
    assert defense.predict(picture).boxes.tolist() == [[2, 2, 6, 6]]


def test_hidden_pixels_are_gray_and_the_picture_stays_as_it_is() -> None:
    picture = torch.ones(3, 10, 10)
    mask = seeker(masks=3).mask_set((10, 10)).masks[0]
    assert hidden(picture, mask)[:, 0, 0].tolist() == pytest.approx([FILL] * 3)
    assert bool((picture == 1).all())


def test_a_detector_that_is_no_function_is_refused() -> None:
    class Wavering(OneBox):
        calls = 0

        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            self.calls += 1
            (output,) = super().forward(images)
            return [{**output, "boxes": output["boxes"] + self.calls}]

    defense = ObjectSeeker(ModuleDetector(Wavering().eval(), ("background", "thing")), "2")
    with pytest.raises(NotAFunctionError, match="needs a function"):
        defense.certify(torch.ones(3, 10, 10), [[2, 2, 6, 6]], [1])


@pytest.mark.parametrize(
    ("threat", "options", "error", "words"),
    [
        ("2", {"prune": 1.5}, InputError, "prune lies above 0"),
        (Threat.square(2, count=2), {}, ThreatError, "1 patch"),
        (Threat.square(2, grid="input"), {}, ThreatError, "as it came"),
    ],
)
def test_settings_that_cannot_be_certified_are_refused(
    threat: str, options: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        seeker(threat, **options)


@pytest.mark.parametrize(
    ("threat", "options", "error", "words"),
    [
        ("any:100%", {}, MaskError, "give lines"),
        ("2", {"stride": 3, "masks": 2}, MaskError, "not both"),
    ],
)
def test_masks_that_hide_no_patch_of_the_threat_are_refused(
    threat: str, options: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        seeker(threat, **options).predict(torch.ones(3, 10, 10))


def test_the_class_of_an_object_must_be_a_class_of_the_detector() -> None:
    with pytest.raises(LabelError, match="0 to 1"):
        seeker().certify(torch.ones(3, 10, 10), [[2, 2, 6, 6]], [2])


def test_detections_need_a_class_and_a_score_for_each_box() -> None:
    with pytest.raises(InputError, match="one for each detection"):
        Detections([[0, 0, 1, 1]], [0, 1], [0.5])


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ([torch.ones(3, 10, 10)], "got list"),
        (np.ones((3, 10, 10)), "got ndarray"),
        (torch.ones(1, 3, 9, 9), "1, 3, 9"),
    ],
)
def test_what_is_not_one_image_is_refused(image: Any, words: str) -> None:
    for look in (seeker().predict, lambda x: seeker().certify(x, [[2, 2, 6, 6]], [1])):
        with pytest.raises(ImageError, match=words):
            look(image)


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ([6, 2, 2, 6], "left < right"),
        ([2, 2, 6, float("nan")], "left < right"),
        ([0.2, 0.2, 0.6, 0.6], "in pixels, not in shares of the image of 10×10 px"),
        ([20, 20, 30, 30], "outside the image of 10×10 px"),
    ],
)
def test_true_boxes_that_cannot_be_right_are_refused(box: list[float], words: str) -> None:
    with pytest.raises(LabelError, match=words):
        seeker().certify(torch.ones(3, 10, 10), [box], [1])


class Returns:
    """A detector of the user's own."""

    classes = ("background", "thing")
    device = torch.device("cpu")
    fingerprint = "returns"

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, image: Tensor) -> Any:
        return self.value


@pytest.mark.parametrize("value", [None, [{"boxes": torch.zeros(0, 4)}], {"boxes": []}])
def test_a_detector_that_returns_no_detections_is_refused(value: Any) -> None:
    with pytest.raises(OutputError, match=r"returns Detections\(boxes, classes, scores\) of one image, got"):
        ObjectSeeker(Returns(value), "2").predict(torch.ones(3, 10, 10))


def test_a_detector_with_a_class_that_it_does_not_name_is_refused_on_clean_images_and_silences_nothing() -> None:
    defense = ObjectSeeker(Returns(Detections([[2, 2, 6, 6]], [7], [0.9])), "2")
    with pytest.raises(OutputError, match=r"from 0 to 1, got \[7\]"):
        defense.certify(torch.ones(3, 10, 10), [[2, 2, 6, 6]], [1])
    assert len(defense.predict(torch.ones(3, 10, 10))) == 1


@pytest.mark.parametrize("make", [ObjectSeeker, lambda name, threat: DetectJob(name, None, threat)])
def test_the_name_of_a_detector_is_refused_with_what_loads_it(make: Any) -> None:
    with pytest.raises(InputError, match=r"load_detector\('yolox:net.onnx'\)"):
        make("yolox:net.onnx", "2")


def test_a_seeker_prints_its_detector_and_threat() -> None:
    assert repr(seeker()) == "ObjectSeeker(ModuleDetector of 2 classes, 2x2 patch)"
