"""The printed patch of the service's page: one 5×5 patch that misleads zoo:tiny wherever it is stuck.

    python benchmarks/printed_patch.py     # five minutes on one core; page/patch.png, its settings inside

Fitted to the sample images that zoo:tiny gets right, which are also the page's. It is stuck upright, at full size and
almost as bright as printed, since that is how the page sticks it.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from patchcleanser import Threat, load_classifier, load_dataset
from patchcleanser.attacks.objectives import class_logits
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.attacks.universal import Printing, UniversalPatch


def main() -> None:
    classifier, sample = load_classifier("zoo:tiny", device="cpu"), load_dataset("sample")
    if sample.labels is None:
        sys.exit("the sample has labels")
    every = [(sample.image(i), int(label)) for i, label in enumerate(sample.labels)]
    right = [(image, label) for image, label in every if int(class_logits(classifier, image[None]).argmax()) == label]
    images, labels = [image for image, _ in right], [label for _, label in right]
    upright = Printing(scale=(1.0, 1.0), rotation=0.0, brightness=(0.95, 1.05))
    attack = UniversalPatch(
        classifier, Threat.square(5), AttackSettings(iterations=1500, seed=0), printing=upright, batch=64
    )
    patch = attack.fit(images, labels)
    patch.save(Path(str(files("patchcleanser.service") / "page" / "patch.png")))
    fooled = attack.fooled(patch, images, labels)
    print(f"misleads {sum(fooled)} of {len(fooled)} images ({sum(fooled) / len(fooled):.1%}) at places drawn anew")


if __name__ == "__main__":
    main()
