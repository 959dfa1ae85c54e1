"""What people have as labelled images becomes a Dataset, or one clear sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)
from torch.utils.data import Dataset as TorchDataset

from patchcleanser import DoubleMasking, Job, PatchCleanserError, Threat, evaluate, load_dataset
from patchcleanser.data.inputs import as_dataset
from patchcleanser.errors import DataError, ImageError, InputError, LabelError, ThreatError

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 8, 3), dtype=np.uint8)
LABELS = [2, 0, 1, 1]
FLOATS = torch.from_numpy(PIXELS).permute(0, 3, 1, 2).float() / 255
NETWORK = nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 8, 3)).eval()


class Photos(TorchDataset[Any]):
    """A map-style dataset in the manner of torchvision's."""

    classes = ("ant", "bee", "cat")

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> Any:
        return Image.fromarray(PIXELS[index]), LABELS[index]


class Renumbered(Photos):
    target_transform = int


class Rows(Photos):
    def __getitem__(self, index: int) -> Any:
        return {"image": FLOATS[index], "label": LABELS[index]}


class Broken(Photos):
    def __getitem__(self, index: int) -> Any:
        raise OSError("the disk is gone")


class Flickering(Photos):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(3, 6, 8), 0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return zip(FLOATS, LABELS, strict=True)


SAME: dict[str, Any] = {
    "pictures": [(Image.fromarray(p), y) for p, y in zip(PIXELS, LABELS, strict=True)],
    "uint8 arrays": list(zip(PIXELS, LABELS, strict=True)),
    "uint8 tensors, channels first": list(zip(torch.from_numpy(PIXELS).permute(0, 3, 1, 2), LABELS, strict=True)),
    "float tensors, labels as tensors": list(zip(FLOATS, torch.tensor(LABELS), strict=True)),
    "float arrays, labels of numpy": list(zip(FLOATS.numpy(), np.array(LABELS), strict=True)),
    "a torch dataset": Photos(),
    "a TensorDataset": TensorDataset(FLOATS, torch.tensor(LABELS)),
    "a shuffled loader of batches": DataLoader(TensorDataset(FLOATS, torch.tensor(LABELS)), batch_size=3, shuffle=True),
}


@pytest.mark.parametrize("data", SAME.values(), ids=SAME)
def test_the_same_images_are_the_same_dataset_however_they_come(data: Any) -> None:
    dataset, expected = as_dataset(data), as_dataset(SAME["uint8 arrays"])
    assert dataset.fingerprint == expected.fingerprint
    assert dataset.labels is not None
    assert dataset.labels.tolist() == LABELS
    assert all(torch.equal(dataset.image(n), FLOATS[n]) for n in range(4))
    assert [dataset.id(n) for n in range(4)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("change", ["pixel", "label", "order"])
def test_the_fingerprint_changes_with_pixels_labels_and_order(change: str) -> None:
    pixels, labels, order = PIXELS.copy(), list(LABELS), [0, 1, 2, 3]
    if change == "pixel":
        pixels[3, 5, 7, 2] ^= 1
    if change == "label":
        labels[0] = 1
    if change == "order":
        order = [1, 0, 2, 3]
    changed = as_dataset([(pixels[n], labels[n]) for n in order])
    assert changed.fingerprint != as_dataset(SAME["uint8 arrays"]).fingerprint


def test_our_own_datasets_pass_as_they_are_also_in_a_loader() -> None:
    sample = load_dataset("sample")
    assert as_dataset(sample) is sample
    assert as_dataset(DataLoader(sample, batch_size=2)) is sample  # type: ignore[arg-type]
    assert as_dataset("sample").fingerprint == sample.fingerprint


def test_class_names_are_those_of_the_torch_dataset_while_they_fit_its_labels() -> None:
    assert as_dataset(Photos()).classes == Photos.classes
    assert as_dataset(Subset(Photos(), [2, 1])).classes == Photos.classes
    assert as_dataset(Subset(Photos(), [2, 1])).name == "Photos"
    assert as_dataset(Renumbered()).classes == ()
    assert as_dataset(SAME["pictures"]).classes == ()


def pair(image: Any = FLOATS[0], label: Any = 0) -> list[Any]:
    return [(image, label)]


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Photos(), **options)


WRONG: dict[str, tuple[Any, type[PatchCleanserError], str]] = {
    "nothing": (None, InputError, "a dataset is a name .*NoneType"),
    "a number": (5, InputError, "got an int"),
    "a class": (Photos, InputError, "the class Photos; make an instance"),
    "a table": (pd.DataFrame({"image": [1]}), DataError, "image 0 of DataFrame cannot be read: KeyError"),
    "a path": (Path("photos"), InputError, "write 'folder:photos'"),
    "a missing folder": ("folder:/no/such/place", DataError, "/no/such/place"),
    "no dataset's name": ("zoo:tiny", DataError, "no dataset 'zoo:tiny'"),
    "a network": (NETWORK, InputError, r"items must be \(image, label\), got a Flatten as item 0 of Sequential"),
    "a threat": (Threat.square(2), InputError, "got a Threat"),
    "a stream": (Stream(), InputError, "iterable-style.*map-style"),
    "a loader of a stream": (DataLoader(Stream()), InputError, "iterable-style"),
    "a generator": ((item for item in pair()), InputError, "got a generator"),
    "a dict": ({"images": FLOATS}, InputError, "got a dict with 'images'"),
    "no images": ([], DataError, "holds no images"),
    "two arrays": ((FLOATS, LABELS), InputError, r"list\(zip\(images, labels\)\)"),
    "images only": (FLOATS, InputError, r"^items must be \(image, label\), got a Tensor as item 0 .*list\(zip\("),
    "rows that are dicts": (Rows(), InputError, r"row\['image'\], row\['label'\]"),
    "three values": ([(FLOATS[0], 0, "a")], InputError, "a tuple of 3"),
    "a dataset that fails": (Broken(), DataError, "image 0 of Broken cannot be read: OSError: the disk is gone"),
    "a sampler": (loader(sampler=SubsetRandomSampler([0])), InputError, "SubsetRandomSampler.*Subset"),
    "a plain batch sampler of some": (
        loader(batch_sampler=BatchSampler(SubsetRandomSampler([0]), 2, drop_last=False)),
        InputError,
        "SubsetRandomSampler.*Subset",
    ),
    "a sampler that repeats": (
        loader(sampler=RandomSampler(Photos(), replacement=True)),
        InputError,
        "RandomSampler.*Subset",
    ),
    "a batch sampler": (loader(batch_sampler=[[0], [1]]), InputError, "Subset"),
    "a name as label": (pair(label="cat"), LabelError, "image 0 of list .*'cat' of type str"),
    "a label in a list": (pair(label=torch.tensor([3])), LabelError, "pass a flat list"),
    "a one-hot label": (pair(label=torch.tensor([0.0, 1.0])), LabelError, "pass the argmax"),
    "a float label": (pair(label=1.0), LabelError, "1.0 of type float"),
    "a negative label": (pair(label=-1), LabelError, "start at 0"),
    "no label": (pair(label=None), LabelError, "None of type NoneType"),
    "normalised pixels": (pair(FLOATS[0] * 4 - 2), ImageError, r"leave Normalize out .*mean=…"),
    "pixels to 255": (pair(FLOATS[0] * 255), ImageError, r"pixels lie in \[0, 1\]: divide them by 255$"),
    "NaN": (pair(FLOATS[0] * float("nan")), ImageError, "NaN"),
    "integers": (pair(torch.ones(3, 6, 8, dtype=torch.int64)), ImageError, "int64"),
    "floats, channels last": (pair(torch.rand(6, 8, 3)), ImageError, r"\[channels, height, width\]"),
    "bytes, channels first": (pair(np.zeros((3, 6, 8), np.uint8)), ImageError, r"\[height, width, channels\]"),
    "a file name": (pair("a.png"), ImageError, "is a str; pass a PIL image"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "kind", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_dataset_is_refused_in_one_sentence(data: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as error:
        Job(NETWORK, data, "2%")
    assert "\n" not in str(error.value)


def test_images_that_differ_with_every_read_are_refused(tmp_path: Path) -> None:
    job = Job(NETWORK, Flickering(), "2x3", masks=2)
    with pytest.raises(InputError, match=r"image 0 of Flickering .*leave random transforms out$"):
        evaluate(job, tmp_path, skip=True)  # leaving out what has changed would be a choice by chance


def test_jobs_and_defenses_take_texts_modules_and_pairs() -> None:
    job = Job(NETWORK, SAME["uint8 arrays"], "2x3")
    assert job.threat == Threat.rectangle(2, 3) == DoubleMasking(NETWORK, "2x3").threat
    assert Job("zoo:tiny", "sample", "any:1%").dataset.name == load_dataset("sample").name
    assert isinstance(job.dataset[0][0], Tensor)


WRONG_THREATS = {"float": 5.5, "share": 0.02, "nothing": None, "pair": (5, 5), "class": Threat, "dataset": "sample"}


@pytest.mark.parametrize("threat", WRONG_THREATS.values(), ids=WRONG_THREATS)
def test_what_is_no_threat_is_refused_alike_by_jobs_and_defenses(threat: Any) -> None:
    for make in (lambda: DoubleMasking(NETWORK, threat), lambda: Job(NETWORK, SAME["pictures"], threat)):
        with pytest.raises(ThreatError, match="12x83"):
            make()


WRONG_OPTIONS: dict[str, dict[str, Any]] = {
    "defense is a class": {"defense": DoubleMasking},
    "defense is a list": {"defense": ["double-masking"]},
    "options is a text": {"options": "threshold=1"},
    "options with numbers as names": {"options": {1: 1}},
}


@pytest.mark.parametrize("options", WRONG_OPTIONS.values(), ids=WRONG_OPTIONS)
def test_wrong_options_of_a_job_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Job(NETWORK, SAME["pictures"], "2x3", **options)


@pytest.mark.parametrize("model", [None, 5, nn.Linear, pd.DataFrame()], ids=["nothing", "int", "class", "table"])
def test_what_is_no_classifier_is_refused_by_jobs(model: Any) -> None:
    with pytest.raises(InputError, match="a classifier is"):
        Job(model, SAME["pictures"], "2x3")
