"""Certify real images once, then ask the stored rows about other defenses and smaller patches.

python examples/certify_and_derive.py
"""

from __future__ import annotations

import tempfile

from patchcleanser import Job, Threat, evaluate, load_classifier, load_dataset
from patchcleanser.data import chosen
from patchcleanser.records.derive import derive
from patchcleanser.records.metrics import summary


def main() -> None:
    images = chosen(load_dataset("sample"), 12, seed=0)
    job = Job(load_classifier("zoo:tiny", device="cpu"), images, Threat.square(5), masks=3, table=True)
    with tempfile.TemporaryDirectory() as folder:  # give a real folder, and a second call goes on where the first was
        run = evaluate(job, folder)
        for name, share in summary(run.read()).shares.items():
            print(f"{name:>15}: {share} (95%: {share.interval[0]:.0f} to {share.interval[1]:.0f})")
        derived = derive(run)
        assert derived is not None  # the job kept its tables
        for name, (clean, cost) in derived.answers.items():
            print(f"{name:>20}: clean {clean}, {cost:.1f} classifications an image")
        for side, certified in derived.smaller:
            print(f"certified against every {side}×{side} patch: {certified}")


if __name__ == "__main__":
    main()
