"""Options that several commands share, and what they mean."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.classifiers import Classifier
    from patchcleanser.classifiers.torch import TorchClassifier
    from patchcleanser.core.threats import Threat
    from patchcleanser.data import Dataset
    from patchcleanser.evaluation.workloads import Runner

Out = Annotated[Path, typer.Option(help="Folder for weights and card, and for what is kept on the way.")]
Model = Annotated[
    str, typer.Option(help="Classifier: zoo:NAME, timm:NAME, torchvision:NAME, onnx:FILE, python:module:make, …")
]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Let a card or a manifest name code to run, or an address to fetch.")
]
Data = Annotated[str, typer.Option(help="Labelled images: sample, cifar10, imagenet, folder:PATH, parquet:PATH, …")]
Root = Annotated[Path | None, typer.Option(help="Where a named dataset's files lie.")]
Split = Annotated[str | None, typer.Option(help="Which part of a named dataset: test (or val), train.")]
Patch = Annotated[str, typer.Option(help="Threat: 32, 2%, 12x83, any:1% or any:502.")]
Limit = Annotated[int | None, typer.Option(help="Only so many images.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Patches = Annotated[int, typer.Option(help="How many patches at once.")]
Masks = Annotated[str | None, typer.Option("--masks", help="Masks per axis: 6, or 6x4 (down x across).")]
Stride = Annotated[str | None, typer.Option(help="Instead of --masks: pixels from mask to mask, 33 or 33x20.")]
Grid = Annotated[
    str | None, typer.Option(help="Pixels meant: source (the image as it came, default) or input (after resizing).")
]
Precision = Annotated[
    str, typer.Option(help="exact (float32), or fast (half precision where it pays, doubtful labels rechecked).")
]
Confirm = Annotated[
    str,
    typer.Option(
        help="With --precision fast: all computes every label of a certified image again in float32, so that its "
        "certificate is a proof; sampled leaves certificates statistical."
    ),
]
Subset = Annotated[str, typer.Option(help="With --limit: random, first, or authors (as the authors chose).")]
Labels = Annotated[
    str, typer.Option(help="The data's classes are the model's by name, by number, or auto: by name if both have any.")
]
Unreadable = Annotated[str, typer.Option(help="An image that cannot be read: stop, or skip (and count).")]
Batch = Annotated[int | None, typer.Option(help="Images kept at a time; a stop loses at most one batch.")]
RunFolder = Annotated[Path | None, typer.Option(help="Run folder; by default one in runs/, named after the job.")]
Threshold = Annotated[
    float | None,
    typer.Option(help="Confidence threshold: minority-reports, patchguard++ (0.5), ds (0.3)."),
]
Options = Annotated[
    list[str] | None, typer.Option("--option", help="An option of the defense: keep=4, ablation=blocks; repeatable.")
]
DefenseNames = "double-masking, challenger-masking, minority-reports, ds, cbn, pg-bn, pg-ds, bagcert, ibp, patchguard++"
On = Annotated[str, typer.Option("--on", help="Where the work is done: here, or ray (a cluster).")]
Address = Annotated[str | None, typer.Option(help="With --on ray: HOST:PORT of the head, auto, or local.")]
Workers = Annotated[
    int | None, typer.Option(help="With --on ray: processes with the model; default: all there is room for.")
]
Gpus = Annotated[float, typer.Option("--gpus-per-worker", help="With --on ray: GPUs of a worker; 0.5 lets two share.")]
Cpus = Annotated[int, typer.Option("--cpus-per-worker", help="With --on ray: cores, and threads, of a worker.")]
PATCH = "2%"
"""The threat if nothing is said: 5×5 px at 32×32, 32×32 px at 224×224."""


def require_outside(out: Path | None, *data: str) -> None:
    """Nothing is written into a folder of images where every folder is a class."""
    from patchcleanser.data.folders import has_class_folders

    target = (out or Path("runs")).resolve()
    for name in data:
        kind, _, address = name.partition(":")
        root = Path(address).expanduser().resolve()
        if kind != "folder" or not address or not target.is_relative_to(root) or not has_class_folders(root):
            continue
        if not any(part.startswith(".") for part in target.relative_to(root).parts):
            raise InputError(
                f"{out or 'runs'} lies in the images' own folder {address}, where every folder is taken for a class; "
                "choose another --out"
            )


@dataclass(frozen=True)
class Images:
    """The labelled images that the options of a run name."""

    data: str
    split: str | None
    root: Path | None
    labels: str
    limit: int | None
    subset: str
    seed: int

    def load(self, classifier: Classifier, *, quiet: bool) -> Dataset:
        """They, under the classifier's class numbers; what somebody should know about it is said."""
        from patchcleanser.data import chosen
        from patchcleanser.evaluation.class_names import match_labels

        if self.subset != "random" and self.limit is None:
            raise InputError(f"--subset {self.subset} says which images --limit takes; give --limit too")
        whole, note = match_labels(named_images(self.data, self.split, self.root), classifier, self.labels)
        notes = [note] if note else []
        if self.limit is not None and self.limit > len(whole):
            notes.append(f"{self.data} has only {len(whole)} images")
        if not quiet:
            for words in notes:
                print(f"note: {words}", file=sys.stderr)
        return chosen(whole, self.limit, seed=self.seed, subset=self.subset)


@dataclass(frozen=True)
class Place:
    """Where the options of a run say that it is done."""

    on: str
    address: str | None
    workers: int | None
    gpus: float
    cpus: int

    def __post_init__(self) -> None:
        if self.on not in ("here", "ray"):
            raise InputError(f"--on is here or ray, got {self.on!r}")
        alien = {
            "--address": self.address is not None,
            "--workers": self.workers is not None,
            "--gpus-per-worker": self.gpus != 0,
            "--cpus-per-worker": self.cpus != 1,
        }
        for name, given in alien.items():
            if given and self.on == "here":
                raise InputError(f"{name} belongs to --on ray")

    @property
    def kind(self) -> str:
        """The kind of device that workers have."""
        return "cuda" if self.gpus else "cpu"

    def device(self, asked: str) -> str:
        """Where this process has the model: with workers that have their own, on the CPU."""
        if self.on == "here":
            return asked
        if asked not in ("auto", self.kind):
            raise InputError(
                f"with --on ray and --gpus-per-worker {self.gpus:g} the workers' device is {self.kind}, got --device "
                f"{asked}"
            )
        return "cpu"

    @contextmanager
    def runner(self, load: Callable[..., Classifier] | None = None) -> Iterator[Runner]:
        """Who does the work; his workers go when it is done. A model that cannot be sent is loaded there by `load`."""
        from patchcleanser.evaluation.workloads import LocalRunner

        if self.on == "here":
            yield LocalRunner()
            return
        from patchcleanser.cluster.runner import RayRunner

        with RayRunner(
            self.address,
            workers=self.workers,
            gpus_per_worker=self.gpus,
            cpus_per_worker=self.cpus,
            make=None if load is None else partial(load, device=self.kind),
        ) as runner:
            yield runner


def checked_run(batch: int | None, unreadable: str) -> bool:
    """Whether images that cannot be read are skipped; nonsense is refused before anything is loaded."""
    if unreadable not in ("stop", "skip"):
        raise InputError(f"--unreadable is stop or skip, got {unreadable!r}")
    if batch is not None and batch < 1:
        raise InputError(f"--batch is at least 1 image, got {batch}")
    return unreadable == "skip"


def default_folder(words: str, job: Mapping[str, Any]) -> Path:
    """Named after the job, with its key, so that the same command goes on with the same run."""
    from patchcleanser.records.provenance import key_of

    return Path("runs") / slug(f"{words}-{key_of(job)[:8]}")


def slug(text: str) -> str:
    """A name for a folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text.replace("%", "pct")).strip("-.")


def named_images(data: str, split: str | None, root: Path | None) -> Dataset:
    """The dataset that the options name."""
    from patchcleanser.data import load_dataset
    from patchcleanser.data.catalog import NAMED

    if split is not None and data not in NAMED:
        raise InputError(f"{data} has no splits and is taken whole; leave out --split {split}")
    return load_dataset(data, split=split or "test", root=root)


def defense_options(
    defenses: str, threshold: float | None, words: list[str] | None = None
) -> dict[str, dict[str, Any]]:
    """What each of the named defenses takes besides masks: --threshold, and --option name=value."""
    from patchcleanser.defenses import DEFENSES

    taken = {name: _settings_of(DEFENSES[name].load()) if name in DEFENSES else {} for name in defenses.split(",")}
    found: dict[str, dict[str, Any]] = {name: {} for name in taken}
    if threshold is not None:
        if not any("threshold" in kinds for kinds in taken.values()):
            raise InputError("--threshold belongs to --defense minority-reports, ds and the like; the others have none")
        found = {name: {"threshold": threshold} if "threshold" in kinds else {} for name, kinds in taken.items()}
    for word in words or []:
        key, equals, text = word.partition("=")
        who = [name for name, kinds in taken.items() if key in kinds]
        if not equals or not who:
            known = ", ".join(dict.fromkeys(key for kinds in taken.values() for key in kinds)) or "none"
            raise InputError(f"--option takes name=value of the defense's own options ({known}), got {word!r}")
        for name in who:
            found[name][key] = _option(key, text, taken[name][key])
    return found


def _settings_of(kind: type[Any]) -> dict[str, type]:
    """A defense's own options, and the type of each; how masks are made has options of the command's own."""
    from inspect import Parameter, signature

    from patchcleanser.defenses.mask_defense import MaskDefense

    own: dict[str, Parameter] = {}
    for parent in kind.__mro__:  # options may go up to a parent by way of **options
        if "__init__" in vars(parent) and parent not in (MaskDefense, object):
            found = signature(vars(parent)["__init__"]).parameters.values()
            own = {**{p.name: p for p in found if p.kind is Parameter.KEYWORD_ONLY}, **own}
    return {name: type(p.default) for name, p in own.items() if p.default is not None}


def _option(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise InputError(f"--option {name} takes a number, got {text!r}") from error


def pair_if(text: str | None, what: str) -> tuple[int, int] | None:
    """The same of an option that may be left out."""
    return None if text is None else pair(text, what)


def pair(text: str, what: str) -> tuple[int, int]:
    """6 or 6x4 as a number for each axis."""
    down, _, across = text.partition("x")
    try:
        return int(down), int(across or down)
    except ValueError as error:
        raise InputError(f"--{what} takes a whole number, or one for each axis as 6x4, got {text!r}") from error


def threat_of(patch: str, patches: int, grid: str | None) -> Threat:
    """The threat that the options name."""
    from patchcleanser.core.threats import Threat

    return Threat.parse(patch, count=patches, grid=grid or "source")  # type: ignore[arg-type]  # checked by Threat


def trainable(model: str, device: str, out: Path, *, trust_code: bool = False) -> TorchClassifier:
    """The torch classifier to train or harden into `out`, which must not hold a finished run."""
    # Here and in the commands torch is imported late, so that --help answers at once.
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.classifiers.torch import TorchClassifier
    from patchcleanser.networks.ensemble import Mean
    from patchcleanser.training.artifacts import CHECKPOINT

    if (out / "card.json").is_file():
        raise InputError(f"{out} holds a finished run; use it as trained:{out}, or use another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise InputError(f"cannot write into {out}: {error.strerror}; use another --out") from error
    classifier = load_classifier(model, device=device, trust_code=trust_code)
    if not isinstance(classifier, TorchClassifier):
        raise InputError(f"{model} cannot be trained: only torch networks can")
    if classifier.mask_aware and not getattr(classifier.module, "mask_aware", False):
        raise InputError(
            f"{model} cannot be trained: it would learn and be kept as the plain network; train that instead"
        )
    if any(isinstance(part, Mean) for part in classifier.module.modules()):
        raise InputError(
            f"{model} is several networks, which learn one by one; train each, and ask for their mean then"
        )
    if (out / CHECKPOINT).is_file():
        print(f"going on from the checkpoint in {out}", file=sys.stderr)
    return classifier


def tell(card: dict[str, Any], out: Path, words: str, *, as_json: bool) -> None:
    """Say what was written and how to use it, or print the card."""
    from patchcleanser.classifiers.registry import names_code

    if as_json:
        print(json.dumps(card, indent=1))
    else:
        flag = " with --trust-code" if names_code(card["model"]) else ""
        print(f"{words}\nwrote {out}/model.safetensors and card.json; use it as trained:{out}{flag}")
