"""Print an adversarial patch on an image, and watch the defense recover the label.

python examples/attack_and_recover.py
"""

from __future__ import annotations

from patchcleanser import DoubleMasking, Threat, load_classifier, load_dataset
from patchcleanser.attacks import PatchPGD
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.classifiers import TorchClassifier


def main() -> None:
    model = load_classifier("zoo:tiny", device="cpu")
    assert isinstance(model, TorchClassifier)  # the attack needs gradients
    threat, sample = Threat.square(5), load_dataset("sample")
    assert sample.labels is not None
    image, label = sample.image(2), int(sample.labels[2])
    found = PatchPGD(model, threat, AttackSettings(iterations=30, locations=4)).attack(image, label)
    (verdict,) = DoubleMasking(model, threat).predict([found.image])
    print(f"true: {sample.classes[label]}; undefended, under attack: {sample.classes[found.label]}")
    print(f"defended: {sample.classes[verdict.label]} (case {verdict.case.value})")


if __name__ == "__main__":
    main()
