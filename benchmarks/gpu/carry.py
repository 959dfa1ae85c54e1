"""Hand out files to folders that fit into one call each.

    python benchmarks/gpu/carry.py runs/packs data/cifar10 start --out runs/carry-cifar10

The folders are OUT/1, OUT/2 and so on; files lie there under their paths in PACKS.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", type=Path)
    parser.add_argument("paths", nargs="+", help="files or folders in PACKS; the first ones travel first")
    parser.add_argument("--mib", type=float, default=56, help="MiB in a call")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.out.exists():
        raise SystemExit(f"{given.out} is there already; remove it")
    found = [given.packs / path for path in given.paths]
    files = [file for path in found for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    calls: list[float] = []
    for file in (file for file in files if file.is_file()):
        size = file.stat().st_size / 2**20
        if size > given.mib:
            raise SystemExit(f"{file} has {size:.1f} MiB, more than the {given.mib:g} of a call")
        number = next((n for n, used in enumerate(calls) if used + size <= given.mib), len(calls))
        if number == len(calls):
            calls.append(0.0)
        calls[number] += size
        target = given.out / str(number + 1) / file.relative_to(given.packs)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    print("\n".join(f"{given.out / str(n)}: {used:.1f} MiB" for n, used in enumerate(calls, 1)))


if __name__ == "__main__":
    main()
