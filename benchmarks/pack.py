"""Images as Parquet files of at most so many MiB, for a machine that nothing can be downloaded to.

    python benchmarks/pack.py cifar10 --webp 100 --out packs/cifar10-train.parquet
    python benchmarks/pack.py imagenette=photos --without ILSVRC2012_val_ --apart imagenette=photos \
        --out packs/imagenette-train.parquet
    python benchmarks/pack.py coco/train2017 dogs/images --shuffle 0 --limit 20000 --webp 60 \
        --apart 'parquet:imagenet-val2000-*.parquet' --out packs/photos.parquet
    python benchmarks/pack.py yolo:coco/images/train --shuffle 0 --skip 8000 --limit 2000 --webp 80 \
        --out packs/coco-test.parquet

Datasets are named as `--data` names them, with the folder where their files lie. A single one keeps its labels: a list
for each image of `coco:`, `voc:` and `yolo:`, as `load_multilabel` reads them. Files are called packs/photos-0.parquet
and so on. What looks like a test image after --apart is left out: equal bytes, or a correlation above 0.95 at 16×16 px,
as it is or mirrored.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from joined import ALIKE, likeness
from numpy.typing import NDArray
from PIL import Image

from patchcleanser.data import Dataset, load_dataset, together
from patchcleanser.data.codec import as_picture, map_images
from patchcleanser.data.dataset import Subset
from patchcleanser.data.multilabel_sets import KINDS, MultiLabelDataset, load_multilabel
from patchcleanser.errors import DataError

BICUBIC = Image.Resampling.BICUBIC
THUMBNAIL = 32
"""Images are compared at this side; `likeness` halves it."""


def read(named: str, split: str) -> Dataset:
    """NAME or NAME=FOLDER, or an address of images with several labels."""
    name, _, root = named.partition("=")
    try:
        return load_dataset(name, split=split, root=root or None)
    except DataError:
        if named.partition(":")[0] not in KINDS:
            raise
        return load_multilabel(named)


def pick(images: Dataset, numbers: NDArray[np.intp]) -> Dataset:
    """The images of these numbers, with their labels."""
    return images.pick(numbers) if isinstance(images, MultiLabelDataset) else Subset(images, numbers)


def thumbnails(images: Dataset) -> NDArray[np.uint8]:
    """All images, squashed to small squares [N, 32, 32, 3]."""

    def thumbnail(index: int) -> NDArray[np.uint8]:
        picture = as_picture(images.image(index)).convert("RGB")
        return np.asarray(picture.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX))

    return np.stack(list(map_images(thumbnail, len(images))))


def apart(images: Dataset, references: list[Dataset]) -> NDArray[np.bool_]:
    """Whether each image is none of the references: other bytes, and unlike every one of them."""
    digests = {reference.digest(index) for reference in references for index in range(len(reference))}
    copies = np.array([images.digest(index) in digests for index in range(len(images))])
    alike = likeness(thumbnails(images), np.concatenate([thumbnails(reference) for reference in references])) > ALIKE
    print(f"left out: {copies.sum()} with the bytes of a test image, {(alike & ~copies).sum()} that look like one")
    return ~(copies | alike)


def encoded(images: Dataset, index: int, webp: int | None, short: int) -> bytes:
    """An image's own bytes, or as WebP (100 is lossless) with a short side of at most so many px."""
    if webp is None:
        return images.content(index)
    picture = as_picture(images.image(index)).convert("RGB")
    scale = short / min(picture.size)
    if scale < 1:
        picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), BICUBIC)
    file = io.BytesIO()
    picture.save(file, "WEBP", quality=webp, lossless=webp == 100)
    return file.getvalue()


def write(contents: list[bytes], numbers: NDArray[np.intp], images: Dataset, out: Path) -> None:
    """One Parquet file of these images, with their labels: lists where there are several, -1 where there are none."""
    rows = [
        {"bytes": content, "path": images.id(int(number))} for content, number in zip(contents, numbers, strict=True)
    ]
    if isinstance(images, MultiLabelDataset):
        lists = [np.flatnonzero(row).tolist() for row in images.targets[numbers]]
        table = pa.table({"image": rows, "labels": pa.array(lists, pa.list_(pa.int32()))})
    else:
        labels = np.full(len(rows), -1) if images.labels is None else images.labels[numbers]
        table = pa.table({"image": rows, "label": pa.array(labels, pa.int32())})
    table = table.replace_schema_metadata({"class_names": json.dumps(images.classes)})
    pq.write_table(table, out, row_group_size=500)
    print(f"{out}: {len(rows)} images, {out.stat().st_size / 2**20:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", help="NAME, or NAME=FOLDER")
    parser.add_argument("--split", default="train")
    parser.add_argument("--without", help="leave out images with this text in their ids")
    parser.add_argument("--shuffle", type=int, help="mix all images first, with this seed")
    parser.add_argument("--labelled", action="store_true", help="leave out images of several labels that have none")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first so many of them")
    parser.add_argument("--limit", type=int, help="the first so many of them, before any that look like test images go")
    parser.add_argument("--apart", action="append", default=[], help="NAME, or NAME=FOLDER: leave out its test images")
    parser.add_argument("--webp", type=int, help="encode as WebP of this quality; 100 is lossless")
    parser.add_argument("--short", type=int, default=256, help="with --webp: reduce longer short sides to this")
    parser.add_argument("--part", type=float, default=18, help="MiB of images in a file")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    if old := sorted(given.out.parent.glob(f"{given.out.stem}-[0-9]*.parquet")):
        raise SystemExit(f"{old[0]} would be taken for a part of what is to be written; remove it")
    sets = [read(named, given.split) for named in given.datasets]
    images = sets[0] if len(sets) == 1 else together(sets)
    order = np.arange(len(images))
    if given.shuffle is not None:
        order = np.random.default_rng(given.shuffle).permutation(order)
    if given.without is not None:
        order = np.array([number for number in order if given.without not in images.id(int(number))])
    if given.labelled and isinstance(images, MultiLabelDataset):
        order = order[images.targets[order].any(axis=1)]
    images = pick(images, order[given.skip :][: given.limit])
    if given.apart:
        images = pick(images, np.flatnonzero(apart(images, [read(named, "test") for named in given.apart])))
    contents = list(map_images(lambda index: encoded(images, index, given.webp, given.short), len(images)))
    parts = np.cumsum([len(content) for content in contents]) // int(given.part * 2**20)
    for number in range(int(parts[-1]) + 1):
        chosen = np.flatnonzero(parts == number)
        write([contents[n] for n in chosen], chosen, images, given.out.with_stem(f"{given.out.stem}-{number}"))


if __name__ == "__main__":
    main()
