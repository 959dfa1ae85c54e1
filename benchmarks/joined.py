r"""Labelled datasets as one, at one size: Parquet files to train on before training on what is wanted.

    git clone … IMagenet
    python benchmarks/joined.py cifar100=data tiny-imagenet=IMagenet --apart cifar10 --parts 3 \
        --out photos/joined.parquet

Datasets are named as `--data` names them, with the folder where their files lie. Their classes stand one after
another, called by dataset and class. What looks like a test image of the dataset after --apart, as it is or
mirrored, is left out: the same photo may lie in both. Several parts are called photos/joined0.parquet and so on.
"""

from __future__ import annotations

import argparse
import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from patchcleanser.data import ArrayDataset, in_memory, load_dataset

QUALITY = 95

ALIKE = 0.95
"""Images at half the size that correlate by more than this are taken for the same photo."""

AT_ONCE = 5000


def encoded(pixels: NDArray[np.uint8]) -> bytes:
    """A JPEG with its colours at full size: at 32×32 they matter."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY, subsampling=0, optimize=True)
    return file.getvalue()


def read(named: str, side: int, split: str = "train") -> ArrayDataset:
    """NAME or NAME=FOLDER at one size."""
    name, _, root = named.partition("=")
    return in_memory(load_dataset(name, split=split, root=root or None), (side, side))


def outlines(images: NDArray[np.uint8]) -> Tensor:
    """At half the size, with mean 0 and length 1: the product of two is their correlation."""
    halved = functional.avg_pool2d(torch.from_numpy(images).permute(0, 3, 1, 2).float(), 2)
    return functional.normalize((halved - halved.mean((1, 2, 3), keepdim=True)).flatten(1))


def likeness(images: NDArray[np.uint8], references: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Each image's highest correlation with any of the references, or with their mirror images."""
    outlined = torch.cat([outlines(references), outlines(references[:, :, ::-1].copy())])
    parts = [(outlines(images[at : at + AT_ONCE]) @ outlined.T).amax(1) for at in range(0, len(images), AT_ONCE)]
    highest: NDArray[np.float32] = torch.cat(parts).numpy()
    return highest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("datasets", nargs="+", help="NAME, or NAME=FOLDER")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--apart", help="NAME, or NAME=FOLDER: leave out what looks like one of its test images")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", type=int, default=1, help="files of equal size")
    parser.add_argument("--shuffle", type=int, default=0, help="the seed by which images are mixed")
    given = parser.parse_args()
    if given.parts < 1 or given.size < 2:
        raise SystemExit(f"there is 1 part or more, of 2 px or more, got --parts {given.parts} --size {given.size}")
    numbers = [""] if given.parts == 1 else map(str, range(given.parts))
    files = [given.out.with_stem(f"{given.out.stem}{number}") for number in numbers]
    if leftovers := sorted(set(given.out.parent.glob(f"{given.out.stem}*{given.out.suffix}")) - set(files)):
        raise SystemExit(
            f"{leftovers[0]} would be taken for a part of what is to be written; remove it or use another --out"
        )
    sets = [read(named, given.size) for named in given.datasets]
    classes = [f"{dataset.name}: {name}" for dataset in sets for name in dataset.classes]
    first = np.cumsum([0, *(len(dataset.classes) for dataset in sets)])
    images = np.concatenate([dataset.images for dataset in sets])
    labels = np.concatenate([dataset.labels + start for dataset, start in zip(sets, first, strict=False)])
    order = np.random.default_rng(given.shuffle).permutation(len(images))
    if given.apart:
        alike = likeness(images, read(given.apart, given.size, "test").images) > ALIKE
        order = order[~alike[order]]
        print(f"{alike.sum()} images look like test images of {given.apart.partition('=')[0]} and are left out")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        for out, part in zip(files, np.array_split(order, given.parts), strict=True):
            contents = pool.map(encoded, images[part])
            table = pa.table(
                {
                    "image": [{"bytes": content, "path": None} for content in contents],
                    "label": pa.array(labels[part], pa.int32()),
                }
            ).replace_schema_metadata({"class_names": json.dumps(classes)})
            pq.write_table(table, out, row_group_size=500)
            print(f"{out}: {len(part)} images of {len(classes)} classes")


if __name__ == "__main__":
    main()
