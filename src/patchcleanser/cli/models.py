"""patchcleanser models: the classifiers at hand, or one of them in detail."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from patchcleanser.cli.options import AsJson, Device, TrustCode

KINDS = {
    "zoo:NAME": "trained here to survive masks; the list is below",
    "trained:FOLDER": "what `train` and `harden` write",
    "timm:NAME?weights=…": "any timm model; weights=hub (default), none or a file",
    "torchvision:NAME?weights=…": "any torchvision classification model",
    "transformers:FOLDER": "an image classifier in Hugging Face's layout, or a hub name",
    "onnx:FILE": "run by ONNX Runtime",
    "python:module:function": "whatever the function returns: a torch module or any function",
    "inpaint:SPEC": "the network of another spec, hidden pixels filled in from visible ones; certificates are its own",
    "mirror:SPEC": "the mean of another's answers to an image and to its mirror image, at twice the cost",
    "mean:SPEC,SPEC": "the mean of several networks' answers; each costs what it costs alone",
    "tokens:SPEC": "the ViT of another spec, leaving out tokens that masks hide; certificates are its own",
    "net:NAME": "untrained networks, most for 32×32 images; the list is below",
}


def models(
    name: Annotated[str | None, typer.Argument(help="One classifier, as for --model.")] = None,
    device: Device = "cpu",
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """How classifiers are named, the zoo at hand, or one classifier's facts."""
    facts = _listed() if name is None else _one(name, device, trust_code)
    if as_json:
        print(json.dumps(facts, indent=1))
    elif name is not None:
        for key, value in facts.items():
            said = ", ".join(map(str, value)) if isinstance(value, list) else value
            print(f"{key:14} {'not known' if said in (None, '') else said}")
    else:
        print("a classifier is named as")
        for kind, words in KINDS.items():
            print(f"  {kind:28} {words}")
        print(f"\nuntrained networks\n  net: {' '.join(facts['networks'])}")
        print("\nthe zoo")
        for entry in facts["zoo"]:
            print(f"  zoo:{entry['name']:24} {entry['network']}, {entry['megabytes']} MB, trained on {entry['data']}")


def _listed() -> dict[str, Any]:
    from patchcleanser.classifiers.trained import read_card, zoo_folders
    from patchcleanser.networks.builders import NETWORKS

    zoo = []
    for name, folder in sorted(zoo_folders().items()):
        card = read_card(folder)
        size = (folder / "model.safetensors").stat().st_size
        entry = {"name": name, "network": card["model"], "megabytes": round(size / 1e6, 1)}
        zoo.append({**entry, "data": card.get("data", {}).get("name"), "weights_sha256": card.get("weights_sha256")})
    return {"kinds": KINDS, "networks": list(NETWORKS), "zoo": zoo}


def _one(spec: str, device: str, trust_code: bool) -> dict[str, Any]:
    from dataclasses import asdict

    from patchcleanser.classifiers import load_classifier
    from patchcleanser.classifiers.torch import TorchClassifier

    classifier = load_classifier(spec, device=device, trust_code=trust_code)
    facts: dict[str, Any] = {"model": spec, "kind": type(classifier).__name__, "classes": classifier.classes}
    if isinstance(classifier, TorchClassifier):
        facts["parameters"] = sum(p.numel() for p in classifier.module.parameters())
    names = list(classifier.names or ())
    return {
        **facts,
        "names": names,
        "preprocessing": asdict(classifier.preprocessing),
        "fingerprint": classifier.fingerprint,
    }
