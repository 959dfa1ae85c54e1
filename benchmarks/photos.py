r"""Photos of folders as Parquet files, to harden with: reduced, or as they are.

    git clone … imagenet-sample-images; git clone … imagen; git clone … IMagenet
    python benchmarks/photos.py imagenet-sample-images imagen --out photos/imagenet.parquet
    python benchmarks/photos.py IMagenet --under tiny-imagenet-200/train --as-they-are \
        --parts 4 --shuffle 0 --out photos/tiny.parquet

Several parts are called photos/tiny0.parquet and so on. Labels are none: every one is 0.
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SHORT = 256
"""Longer short sides are reduced to this."""

QUALITY = 85


def reduced(path: Path) -> bytes:
    """A JPEG with a short side of at most 256 px."""
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    share = SHORT / min(picture.size)
    if share < 1:
        size = round(picture.width * share), round(picture.height * share)
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=QUALITY, progressive=True, optimize=True)
    return file.getvalue()


def find_photos(folders: list[Path], under: str) -> Iterator[tuple[Path, str]]:
    """All JPEG files, folder by folder, by name, with their names in it."""
    for folder in folders:
        files = (path for path in (folder / under).rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
        yield from ((path, path.relative_to(folder).as_posix()) for path in sorted(files))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--under", default="", help="only what lies in this folder of each")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", type=int, default=1, help="files of equal size")
    parser.add_argument("--shuffle", type=int, help="mix all photos first, with this seed")
    parser.add_argument("--as-they-are", action="store_true", help="keep the files' bytes: small photos")
    given = parser.parse_args()
    read = Path.read_bytes if given.as_they_are else reduced
    photos = list(find_photos(given.folders, given.under))
    if not photos or given.parts < 1:
        raise SystemExit(f"no JPEG files in {', '.join(map(str, given.folders))}, or no parts to write ({given.parts})")
    if given.shuffle is not None:
        random.Random(given.shuffle).shuffle(photos)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    each = -(-len(photos) // given.parts)
    with ProcessPoolExecutor() as pool:
        for part in range(given.parts):
            chosen = photos[part * each : (part + 1) * each]
            contents = pool.map(read, [path for path, _ in chosen], chunksize=50)
            images = [{"bytes": content, "path": name} for (_, name), content in zip(chosen, contents, strict=True)]
            out = given.out if given.parts == 1 else given.out.with_stem(f"{given.out.stem}{part}")
            table = pa.table({"image": images, "label": pa.array([0] * len(images), pa.int32())})
            pq.write_table(table, out, row_group_size=500)
            print(f"{out}: {len(images)} photos")


if __name__ == "__main__":
    main()
