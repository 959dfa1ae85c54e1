"""Multi-label training: its loss and metric, and runs that learn, stop and go on."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch import Tensor, nn

from patchcleanser import Threat
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.data import ArrayDataset, in_memory, load_dataset
from patchcleanser.data.multilabel_sets import TargetArrays, load_multilabel
from patchcleanser.errors import InputError, TrainingError
from patchcleanser.networks.builders import resnet
from patchcleanser.training import RECIPES, Cutout, Recipe, fit
from patchcleanser.training.selection import two_mask_views
from patchcleanser.training.several_labels import (
    ScoreSelector,
    binary_losses,
    mean_average_precision,
    top_class_is_shown,
)

COLOURS = {"red": (255, 40, 40), "green": (40, 255, 40), "blue": (40, 40, 255)}
QUICK = Recipe(
    epochs=12,
    batch=30,
    optimizer="adamw",
    rate=3e-3,
    cutout=Cutout(2, 4, 8),
    loss="binary",
    holdout=0.2,
    precision="no",
)
NORM = {"preprocessing": Preprocessing((32, 32), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))}


def write_squares(folder: Path, number: int = 300) -> str:
    """The address of grey images with a square of each colour that they show, at random places."""
    generator = np.random.default_rng(0)
    lists, contents = [], []
    for _ in range(number):
        pixels = generator.integers(60, 120, (32, 32, 3), dtype=np.uint8)
        shown = np.flatnonzero(generator.random(3) < 0.4)
        for label in shown:
            top, left = generator.integers(0, 24, 2)
            pixels[top : top + 8, left : left + 8] = list(COLOURS.values())[label]
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        contents.append({"bytes": file.getvalue()})
        lists.append(shown.tolist())
    table = pa.table({"image": contents, "labels": pa.array(lists, pa.list_(pa.int32()))})
    names = {"class_names": json.dumps(list(COLOURS))}
    parquet.write_table(table.replace_schema_metadata(names), folder / "squares.parquet")
    return f"parquet:{folder / 'squares.parquet'}"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_squares(tmp_path_factory.mktemp("squares"))


@pytest.fixture(scope="module")
def squares(address: str) -> TargetArrays:
    return TargetArrays(load_multilabel(address), (32, 32))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return resnet(layers=(1, 1, 1, 1), channels=(8, 12, 16, 24), stem_stride=2, classes=3)


def test_average_precision_is_that_of_every_threshold_one_by_one() -> None:
    generator = np.random.default_rng(0)
    scores = generator.integers(0, 6, (40, 5)).astype(float)  # with ties
    targets = generator.random((40, 5)) < 0.3
    targets[:, 4] = False  # a class that no image shows has no precision
    expected = []
    for score, shown in zip(scores.T[:4], targets.T[:4], strict=True):
        area = 0.0
        for threshold in np.unique(score):
            retrieved = score >= threshold
            newly = (shown & (score == threshold)).sum() / shown.sum()
            area += newly * (shown & retrieved).sum() / retrieved.sum()
        expected.append(area)
    assert mean_average_precision(scores, targets) == pytest.approx(np.mean(expected))
    assert mean_average_precision(targets.astype(float), targets) == 1
    assert np.isnan(mean_average_precision(scores, targets & False))


def test_the_loss_of_an_image_does_not_depend_on_the_others() -> None:
    logits = torch.tensor([[20.0, -20.0], [-20.0, 20.0]])
    targets = torch.tensor([[1, 0], [1, 0]])
    assert binary_losses(logits, targets).tolist() == pytest.approx([0, 20], abs=1e-6)
    assert top_class_is_shown(logits, targets).tolist() == [True, False]


class Corner(nn.Module):
    """Scores of two classes: the upper left pixel, and the mean of all."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([inputs[:, 0, 0, 0], inputs.mean((1, 2, 3))], dim=1)


def test_the_worst_scores_are_no_better_than_those_of_any_view() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(64, 3, 32, 32, generator=generator), torch.zeros(64, 2, dtype=torch.int64)
    targets[:, 0] = inputs[:, 0, 0, 0] > 0
    targets[:, 1] = inputs.mean((1, 2, 3)) > 0.01
    views = two_mask_views(Threat.square(5), (32, 32), torch.device("cpu"))
    clean, worst = (float(score) for score in ScoreSelector(inputs, targets, views, batch=10)(Corner()))
    assert clean == 1
    each = []
    for hidden in views:
        scores = Corner()(inputs.masked_fill(hidden, 0.0))
        each.append(mean_average_precision(scores.numpy(), targets.bool().numpy()))
    assert 0 < worst < min(each)


def test_squares_of_several_colours_are_learnt_and_the_best_weights_returned(
    squares: TargetArrays, tmp_path: Path
) -> None:
    recipe = replace(QUICK, epochs=8, rate=1e-2, cutout=Cutout(1, 4, 6))
    fitted = fit(network(), squares, recipe, **NORM, out=tmp_path, every=3)
    checked = [epoch for epoch in fitted.history if epoch.clean is not None]
    assert fitted.best.survival == max(epoch.survival or 0 for epoch in checked)
    assert (fitted.best.clean or 0) > 0.9  # each colour is in 40% of the images
    assert fitted.history[-1].loss < fitted.history[0].loss


def test_a_killed_run_goes_on_and_ends_like_an_unbroken_one(squares: TargetArrays, tmp_path: Path) -> None:
    def stop(done: float, epochs: int, text: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    recipe = replace(RECIPES["multilabel"], epochs=3, batch=60, shift=2, precision="no")
    unbroken = fit(network(), squares, recipe, **NORM, out=tmp_path / "a", every=1)
    with pytest.raises(KeyboardInterrupt):
        fit(network(), squares, recipe, **NORM, out=tmp_path / "b", every=1, on_progress=stop)
    resumed = fit(network(9), squares, recipe, **NORM, out=tmp_path / "b", every=1)
    weights = [result.module.state_dict() for result in (unbroken, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    fewer = TargetArrays(load_multilabel(write_squares(tmp_path, 200)), (32, 32))
    with pytest.raises(TrainingError, match="other data"):
        fit(network(), fewer, recipe, **NORM, out=tmp_path / "b")


def test_a_loss_gets_the_labels_that_it_learns(squares: TargetArrays, tmp_path: Path) -> None:
    sample: ArrayDataset = in_memory(load_dataset("sample"), (32, 32))
    with pytest.raises(TrainingError, match="has one label for each image, which the loss 'binary'"):
        fit(network(), sample, QUICK, **NORM, out=tmp_path)
    with pytest.raises(TrainingError, match="has several labels for each image, which the loss 'label'"):
        fit(network(), squares, replace(QUICK, loss="label"), **NORM, out=tmp_path)
    for settings in ({"teacher_weight": 0.5}, {"label_smoothing": 0.1}):
        with pytest.raises(InputError, match="takes no teacher and no label smoothing"):
            replace(QUICK, **settings)  # type: ignore[arg-type]
