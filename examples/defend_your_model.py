"""Defend a network of your own and see where an image is weak.

python examples/defend_your_model.py
"""

from __future__ import annotations

from patchcleanser import DoubleMasking, Threat, load_classifier
from patchcleanser.data import load_dataset


def main() -> None:
    model = load_classifier("zoo:tiny", device="cpu")  # put your torch module, timm name or function here
    defense = DoubleMasking(model, Threat.square(5), masks=3)
    sample = load_dataset("sample")
    images = [sample.image(i) for i in range(4)]
    labels = [int(sample.labels[i]) for i in range(4)] if sample.labels is not None else []
    for verdict, label in zip(defense.predict(images), labels, strict=True):
        print(f"{sample.classes[label]:>10} → {sample.classes[verdict.label]} ({verdict.case.value})")
    for certificate in defense.certify(images, labels, maps=True):
        safe = certificate.positions[5, 5] if certificate.positions else None
        share = 0.0 if safe is None else float(safe.mean())
        print(f"certified: {certificate.certified!s:5}  positions proved safe: {share:.0%}")


if __name__ == "__main__":
    main()
