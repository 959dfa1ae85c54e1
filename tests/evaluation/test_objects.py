"""`certify --task detect`: rows, resumed runs, reports, and refusals, on a tiny detector."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as compute
import pytest
import torch
from pyarrow import parquet
from torch import Tensor, nn
from typer.testing import CliRunner

from patchcleanser import Run, Threat, evaluate
from patchcleanser.cli.app import app
from patchcleanser.core.detections import Detections
from patchcleanser.data.dataset import ArrayDataset
from patchcleanser.data.object_sets import ObjectDataset
from patchcleanser.detectors.torchvision_detectors import ModuleDetector
from patchcleanser.errors import DataError, InputError, MaskError, RecordError
from patchcleanser.evaluation.detect_jobs import DetectJob
from patchcleanser.records.derive_objects import all_objects, derived_promises, derived_threats
from patchcleanser.records.metrics import object_values
from patchcleanser.reports import write_object_report

CLASSES = ("background", "bright", "dark")
SIDE = 24


class BrightParts(nn.Module):
    """Sees the rectangle around all bright pixels, if there are enough of them."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        rows, columns = (images[0].amin(dim=0) > 0.9).nonzero(as_tuple=True)
        boxes = torch.zeros(0, 4)
        if len(rows) >= 12:
            corners = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            boxes = torch.stack(corners).float()[None]
        number = len(boxes)
        labels = torch.ones(number, dtype=torch.int64)
        return [{"boxes": boxes, "labels": labels, "scores": torch.full((number,), 0.9)}]


def dataset(images: int = 5) -> ObjectDataset:
    """Black pictures with a bright rectangle, each at another place; the last has no object."""
    pixels = np.zeros((images, SIDE, SIDE, 3), dtype=np.uint8)
    objects = []
    for number in range(images - 1):
        top, left = 2 + number, 3
        pixels[number, top : top + 6, left : left + 6] = 255
        objects.append(Detections([[left, top, left + 6, top + 6]], [1], [1.0]))
    arrays = ArrayDataset("bright", pixels, np.zeros(images, dtype=np.int64), ("any",))
    return ObjectDataset(arrays, [*objects, Detections([], [], [])], CLASSES)


def job(**changes: Any) -> DetectJob:
    settings = {"masks": 4, "lines": 7, **changes}
    return DetectJob(ModuleDetector(BrightParts().eval(), CLASSES), dataset(), Threat.square(3), **settings)


def rows_of(run: Run) -> list[dict[str, Any]]:
    names = [name for name in run.schema.names if name != "seconds"]
    return [
        {**row, **{p: np.nan_to_num(row[p], nan=-1).tolist() for p in ("over", "near", "far")}}
        for row in run.read(names).to_pylist()
    ]


def test_rows_hold_what_the_defense_certifies(tmp_path: Path) -> None:
    work = job()
    run = evaluate(work, tmp_path / "run")
    first = run.read().to_pylist()[0]
    examined = work.built.examine(work.dataset.image(0), work.dataset.objects[0].boxes, [1])
    (certificate,) = examined.certificates
    assert (first["over"], first["near"], first["far"]) == ([certificate.over], [certificate.near], [certificate.far])
    assert certificate.far is not None
    assert certificate.far >= 0.79
    assert first["promises"] == examined.promises.ravel().tolist()
    assert first["classifications"] == 1 + len(run.mask_set((SIDE, SIDE)))
    assert run.read().to_pylist()[-1]["over"] == []


def test_shares_are_those_of_objects_not_of_images(tmp_path: Path) -> None:
    summary = evaluate(job(), tmp_path / "run").summary()
    assert (summary.images, summary.shares["undefended"].total) == (5, 4)
    assert summary.shares["undefended"].count == summary.shares["clean"].count == 4
    assert summary.shares["certified_far"].count == 4
    assert summary.shares["certified_over"].count <= summary.shares["certified_near"].count


def test_a_run_that_was_stopped_has_the_same_rows_as_one_that_was_not(tmp_path: Path) -> None:
    once = evaluate(job(), tmp_path / "once", batch=2)
    resumed = evaluate(job(), tmp_path / "resumed", batch=2)
    resumed.shard(1).unlink()
    assert not Run.open(tmp_path / "resumed").finished
    assert rows_of(evaluate(job(), tmp_path / "resumed", batch=2)) == rows_of(once)


@pytest.mark.parametrize("changes", [{"lines": 5}, {"masks": 3}, {"prune": 0.9}, {"masked_score": 0.4}])
def test_another_job_does_not_continue_a_run(changes: dict[str, Any], tmp_path: Path) -> None:
    evaluate(job(), tmp_path / "run")
    with pytest.raises(RecordError, match="another job"):
        evaluate(job(**changes), tmp_path / "run")


def changed(run: Run, column: str, change: Any) -> Run:
    """The run with one value of its first row changed, and checksums removed."""
    path = run.shard(0)
    rows = parquet.read_table(path).to_pylist()
    rows[0][column] = change(rows[0][column])
    manifest = run.folder / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({name: content[name] for name in content if name not in ("columns", "checksum")}))
    import pyarrow as pa

    parquet.write_table(pa.Table.from_pylist(rows, schema=run.schema), path)
    return Run.open(run.folder)


@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        ("far", lambda values: [2.0], "out of range"),
        ("far", lambda values: [*values, 0.5], "not one for each object"),
        ("defended", lambda values: [0.1], "covers less"),
        ("boxes", lambda values: values[:3], "its boxes are not one"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(column: str, change: Any, words: str, tmp_path: Path) -> None:
    run = evaluate(job(), tmp_path / "run")
    with pytest.raises(RecordError, match=words):
        changed(run, column, change).read()


def test_other_patches_are_derived_from_the_rows_as_the_detector_would_certify_them(tmp_path: Path) -> None:
    run = evaluate(job(), tmp_path / "run")
    smaller = Threat.square(2)
    derived = derived_promises(run, run.read(), [smaller, run.threat])
    assert derived[run.threat]["far"].tolist() == object_values(run.read(), "far").tolist()
    defense, data = job().built, dataset()
    masks = defense.mask_set((SIDE, SIDE))
    defense.threat, defense.mask_set = smaller, lambda size: masks  # the masks of the run, a smaller patch
    certificates = [c for i, o in enumerate(data.objects) for c in defense.certify(data.image(i), o.boxes, o.classes)]
    assert derived[smaller]["over"].tolist() == [certificate.over for certificate in certificates]
    assert (derived[smaller]["over"] >= derived[run.threat]["over"]).all()


def test_a_patch_of_any_size_is_certified_far_but_never_over_an_object(tmp_path: Path) -> None:
    run = evaluate(replace(job(), threat=Threat.parse("any:100%")), tmp_path / "run")
    assert len(run.mask_set((SIDE, SIDE))) == 28  # half-planes only
    shares = run.summary().shares
    assert shares["certified_far"].count == 4
    assert shares["certified_over"].count == 0
    assert derived_threats(run) == [run.threat]


def test_a_report_shows_recall_and_pictures_without_the_detector(tmp_path: Path) -> None:
    run = evaluate(job(), tmp_path / "run")
    page = write_object_report([run], tmp_path / "report").read_text(encoding="utf-8")
    assert "100.0% of objects certified against a patch far from them" in page
    assert page.count("<figure data-image=") == 4
    assert 'class="object"' in page
    table = (tmp_path / "report" / "tables" / "objects.csv").read_text()
    assert "any size" in table
    assert (tmp_path / "report" / "figures" / "recall.svg").is_file()


def test_a_dataset_under_other_class_numbers_is_refused() -> None:
    other = ObjectDataset(dataset().images, dataset().objects, ("bright",))
    with pytest.raises(InputError, match="not the detector's"):
        replace(job(), dataset=other)


def test_masks_that_cannot_be_built_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(MaskError, match="give lines"):
        evaluate(replace(job(lines=0), threat=Threat.parse("any:100%")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_recorded_objects_are_those_of_the_dataset(tmp_path: Path) -> None:
    run = evaluate(job(), tmp_path / "run")
    boxes = [each.box.tolist() for each in all_objects(run, run.read())]
    assert boxes == [box for each in dataset().objects for box in each.boxes.tolist()]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "detect", "--defense", "challenger-masking"], "does not take --defense"),
        (["--task", "detect", "--table"], "does not take --table"),
        (["--task", "detect", "-m", "zoo:tiny"], "cannot read detector"),
        (["--lines", "3"], "--lines belongs to --task detect"),
        (["--task", "segment"], "--task is classify, multilabel or detect"),
    ],
)
def test_options_of_the_other_task_are_refused(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["certify", *options])
    assert words in str(result.exception)


def test_the_command_certifies_objects_and_the_report_command_shows_them(tmp_path: Path) -> None:
    from detectors.test_detectors import exported, red_picture
    from patchcleanser.data.codec import as_picture

    exported(tmp_path / "net.onnx", 6, (0.5, 0.25, 0.5, 0.0), 15)
    pictures, labels = tmp_path / "images" / "val", tmp_path / "labels" / "val"
    for folder in (pictures, labels):
        folder.mkdir(parents=True)
    as_picture(red_picture(64, 48)).save(pictures / "a.png")
    labels.joinpath("a.txt").write_text("15 0.83 0.3 0.5 0.25\n")
    typed = [
        "certify",
        "--task",
        "detect",
        "-m",
        f"yolox:{tmp_path}/net.onnx",
        "-d",
        f"yolo:{pictures}",
        "-p",
        "8,any:100%",
    ]
    result = CliRunner().invoke(
        app, [*typed, "--lines", "5", "--device", "cpu", "-o", str(tmp_path / "runs"), "--json"]
    )
    assert result.exception is None
    first, second = json.loads(result.stdout)
    assert first["undefended"]["count"] == first["clean"]["count"] == 1
    assert second["job"]["threat"]["shape"] == "any:100%"
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--json"])
    assert shown.exception is None
    assert (tmp_path / "runs" / "report" / "report.html").is_file()
    rows = Run.open(tmp_path / "runs" / "8x8").read()
    assert compute.sum(rows["classifications"]).as_py() == 1 + 36 + 20


def test_an_image_that_cannot_be_read_is_skipped_with_the_reason_in_its_row(tmp_path: Path) -> None:
    class Damaged(ArrayDataset):
        def image(self, index: int) -> Tensor:
            if index == 0:
                raise DataError("image 0 is damaged")
            return super().image(index)

    whole = dataset()
    images = whole.images
    assert isinstance(images, ArrayDataset)
    damaged = Damaged(images.name, images.images, images.labels, images.classes)
    work = replace(job(), dataset=ObjectDataset(damaged, whole.objects, CLASSES))
    with pytest.raises(DataError, match="--unreadable skip"):
        evaluate(work, tmp_path / "stopped")
    run = evaluate(work, tmp_path / "run", skip=True)
    assert run.read(["skipped"])["skipped"].to_pylist() == ["image 0 is damaged", None, None, None, None]
    assert (run.summary().skipped, run.summary().shares["undefended"].total) == (1, 3)
    assert "in 4 images" in write_object_report([run], tmp_path / "report").read_text(encoding="utf-8")
