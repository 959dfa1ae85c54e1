"""Options that several commands share, grouped into dataclasses, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.config import call, read_config
from patchcleanser.cli.progress import LOGGER
from patchcleanser.core.counts import counted
from patchcleanser.defenses import DEFENSES
from patchcleanser.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from patchcleanser.classifiers import Classifier
    from patchcleanser.core.threats import Threat
    from patchcleanser.data import Dataset
    from patchcleanser.evaluation import Job
    from patchcleanser.evaluation.workloads import Runner

PATCH = "2%"
"""The default threat: 5×5 px at 32×32, 32×32 px at 224×224."""

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Grid = Annotated[str | None, typer.Option(help="The threat's pixels: source (default), or input (after resizing).")]
Limit = Annotated[int | None, typer.Option(help="Use only this many images.")]
Option = Annotated[
    list[str] | None, typer.Option(help="An option of the --defense as name=value (ds: keep=4); repeatable.")
]
Patch = Annotated[
    str,
    typer.Option(help="Patch: 32 (px), 2% (of the area), 12x83 (height x width), any:1%, any:502 (rectangles)."),
]
Precision = Annotated[str, typer.Option(help="exact (float32), or fast (half precision, uncertain labels rechecked).")]
Root = Annotated[Path | None, typer.Option(help="Folder that holds the files of a named dataset.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Split = Annotated[str | None, typer.Option(help="Part of a named dataset: test (or val), train.")]
TrustCode = Annotated[bool, typer.Option("--trust-code", help="Let cards and manifests name code to run, or URLs.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what it will cost; nothing is written.")]


@dataclass(frozen=True)
class CommonOptions:
    """What every command has."""

    config: Annotated[
        Path | None,
        typer.Option(
            callback=read_config,
            is_eager=True,
            help="TOML file of options, or a run whose options are taken; what is typed wins.",
        ),
    ] = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Print results and errors only.")] = False
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False


@dataclass(frozen=True)
class ThreatOptions:
    """The patches that the attacker may print."""

    patch: Patch = PATCH
    patches: Annotated[int, typer.Option(help="Number of patches at once.")] = 1


@dataclass(frozen=True)
class MaskOptions(ThreatOptions):
    """A threat, and the masks against it."""

    masks: Annotated[str | None, typer.Option(help="Masks per axis: 6 (default), or 6x4 (rows x columns).")] = None
    stride: Annotated[str | None, typer.Option(help="Instead of --masks: pixels between masks, 33 or 33x20.")] = None

    @property
    def mask_set_options(self) -> dict[str, tuple[int, int] | None]:
        """`masks` and `stride` for each axis."""
        texts = {"masks": self.masks, "stride": self.stride}
        return {name: None if text is None else per_axis(text, name) for name, text in texts.items()}


@dataclass(frozen=True)
class ClassifierOptions(ThreatOptions):
    """A classifier, and a threat on its images."""

    model: Annotated[str, typer.Option(help="Classifier: zoo:NAME, timm:NAME, onnx:FILE, …; see models.")] = "zoo:tiny"
    grid: Grid = None
    device: Device = "auto"
    precision: Precision = "exact"
    trust_code: TrustCode = False

    @property
    def threat(self) -> Threat:
        return parse_threat(self.patch, self.patches, self.grid)

    @property
    def loader(self) -> Callable[..., Classifier]:
        """Loads the classifier on the `device` it is called with."""
        from patchcleanser.classifiers import load_classifier

        return partial(load_classifier, self.model, trust_code=self.trust_code, named_by=call().named_by("model"))


@dataclass(frozen=True)
class DefenseOptions(ClassifierOptions, MaskOptions):
    """A classifier and its defense, as certify, attack, predict and serve take them."""

    defense: Annotated[str, typer.Option(help=f"{', '.join(DEFENSES)}; the first four use masks.")] = "double-masking"
    coarse: Annotated[
        int, typer.Option(help="Larger masks per axis to try first, as 3: cheaper predictions. 0 is none.")
    ] = 0
    threshold: Annotated[float | None, typer.Option(help="Confidence threshold of minority-reports, ds, …")] = None

    def of_defenses(self, options: list[str] | None = None) -> dict[str, dict[str, Any]]:
        """The options of each defense of a comma list: --threshold, --coarse, and --option name=value."""
        types = {n: _option_types(DEFENSES[n].load()) if n in DEFENSES else {} for n in self.defense.split(",")}
        texts = list(options or [])
        if self.coarse < 0 or self.coarse == 1:
            raise InputError(f"--coarse is 0 for none, or at least 2 masks per axis, got {self.coarse}")
        for name, value, owners in (
            ("threshold", self.threshold, "minority-reports, ds and the like"),
            ("coarse", self.coarse or None, "double-masking or challenger-masking"),
        ):
            if value is None:
                continue
            if not any(name in names for names in types.values()):
                raise InputError(f"--{name} belongs to --defense {owners}; the others have none")
            texts.append(f"{name}={value}")
        values: dict[str, dict[str, Any]] = {name: {} for name in types}
        for text in texts:
            _add_option(values, types, text)
        return values


@dataclass(frozen=True)
class ImageOptions(ClassifierOptions):
    """A classifier, and labelled images for it."""

    data: Annotated[str, typer.Option(help="Labelled images: sample, cifar10, folder:PATH, …; see data.")] = "sample"
    split: Split = None
    root: Root = None
    labels: Annotated[str, typer.Option(help="Match classes by name, by number, or auto (name if possible).")] = "auto"
    limit: Limit = None
    subset: Annotated[
        str, typer.Option(help="What --limit takes: random, first, or authors (as the paper's code).")
    ] = "random"
    seed: Seed = 0

    def images(self, classifier: Classifier) -> Dataset:
        """The images under the classifier's class numbers."""
        from patchcleanser.data import chosen
        from patchcleanser.evaluation.class_names import match_labels

        if self.subset != "random" and self.limit is None:
            raise InputError(f"--subset {self.subset} says which images --limit takes; give --limit too")
        images = named_images(self.data, self.split, self.root, trust_code=self.trust_code)
        dataset, note = match_labels(images, classifier, self.labels)
        few = self.limit is not None and self.limit > len(dataset)
        for text in (note, f"{self.data} has only {counted(len(dataset), 'image')}" if few else None):
            if text:
                LOGGER.info(text)
        return chosen(dataset, self.limit, seed=self.seed, subset=self.subset)


@dataclass(frozen=True)
class RunOptions(DefenseOptions, ImageOptions):
    """A defense, labelled images, and where their rows go, for certify and attack."""

    unreadable: Annotated[str, typer.Option(help="An image that cannot be read: stop, or skip and count it.")] = "stop"
    batch: Annotated[int | None, typer.Option(help="Images written at a time; a stop loses at most one batch.")] = None
    out: Annotated[Path | None, typer.Option(help="Run folder; by default one in runs/, named after the job.")] = None

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise InputError(f"--batch is at least 1 image, got {self.batch}")
        require_outside(self.out, self.data)

    @property
    def skip(self) -> bool:
        """Whether images that cannot be read are left out."""
        return self.unreadable == "skip"

    def job(self, classifier: Classifier, dataset: Dataset, **options: Any) -> Job:
        """The job to run; `options` are further fields of Job."""
        from patchcleanser.evaluation import Job

        fields = {**self.mask_set_options, "precision": self.precision, **options}
        return Job(classifier, dataset, self.threat, self.defense, **fields)


@dataclass(frozen=True)
class ClusterOptions:
    """This machine, or a Ray cluster."""

    on: Annotated[str, typer.Option(help="Where the work is done: here, or ray (a cluster).")] = "here"
    address: Annotated[str | None, typer.Option(help="With --on ray: HOST:PORT of the head, auto, or local.")] = None
    gpus: Annotated[float, typer.Option("--gpus-per-worker", help="With --on ray: GPUs per worker, as 0.5.")] = 0
    cpus: Annotated[int, typer.Option("--cpus-per-worker", help="With --on ray: cores and threads per worker.")] = 1

    def __post_init__(self) -> None:
        flags = {"--address": self.address, "--gpus-per-worker": self.gpus, "--cpus-per-worker": self.cpus != 1}
        self.require_ray(flags)

    def require_ray(self, flags: Mapping[str, Any]) -> None:
        """InputError if one of these flags is given without --on ray."""
        for name, value in flags.items():
            if value and self.on == "here":
                raise InputError(f"{name} belongs to --on ray")

    @property
    def worker_device(self) -> str:
        """The kind of device that workers have."""
        return "cuda" if self.gpus else "cpu"

    def device(self, device: str) -> str:
        """Where this process loads the model: on the CPU if workers have their own, else on `device`."""
        if self.on == "here":
            return device
        if device not in ("auto", self.worker_device):
            raise InputError(
                f"with --on ray and --gpus-per-worker {self.gpus:g} the workers' device is {self.worker_device}, "
                f"got --device {device}"
            )
        return "cpu"


@dataclass(frozen=True)
class RunnerOptions(ClusterOptions):
    """Where the batches of a run are computed: certify, attack, audit and reproduce."""

    workers: Annotated[int | None, typer.Option(help="With --on ray: processes; by default as many as fit.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_ray({"--workers": self.workers is not None})

    @contextmanager
    def start(self, load: Callable[..., Classifier] | None = None) -> Iterator[Runner]:
        """A runner, whose workers end with the context. They call `load` if the model cannot be sent to them."""
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
            make=None if load is None else partial(load, device=self.worker_device),
        ) as runner:
            yield runner


def require_outside(out: Path | None, *data: str) -> None:
    """InputError if results would go into a file, or into a folder of images where every subfolder is a class."""
    from patchcleanser.data.catalog import full_name
    from patchcleanser.data.folders import has_class_folders

    if out is not None and out.is_file():
        raise InputError(f"{out} is a file, not a folder; choose another --out")
    target = (out or Path("runs")).resolve()
    for name in data:
        kind, _, address = full_name(name).partition(":")
        root = Path(address).expanduser().resolve()
        if kind != "folder" or not target.is_relative_to(root) or not has_class_folders(root):
            continue
        if not any(part.startswith(".") for part in target.relative_to(root).parts):
            raise InputError(
                f"{out or 'runs'} lies in the images' own folder {address}, where every folder is taken for a class; "
                "choose another --out"
            )


def default_folder(name: str, identity: Mapping[str, Any]) -> Path:
    """A folder named after the job and its key, so that the same command goes on with the same run."""
    from patchcleanser.records.provenance import key_of

    return Path("runs") / slug(f"{name}-{key_of(identity)[:8]}")


def keeping(folders: Iterable[Path]) -> AbstractContextManager[None]:
    """Make Ctrl-C a KeptInterrupt if one of these folders has rows by then, of this call or of an earlier one."""
    from patchcleanser.records.atomic import interruptible

    places = list(folders)
    return interruptible(lambda: any(path for folder in places for path in folder.glob("rows-*.parquet")))


def slug(text: str) -> str:
    """The text as a folder name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text.replace("%", "pct")).strip("-.")


def named_images(data: str, split: str | None, root: Path | None, *, trust_code: bool = False) -> Dataset:
    """The dataset of --data, --split and --root."""
    from patchcleanser.data import load_dataset
    from patchcleanser.data.catalog import NAMED

    if split is not None and data not in NAMED:
        raise InputError(f"{data} has no splits and is taken whole; leave out --split {split}")
    return load_dataset(data, split=split or "test", root=root, trust_code=trust_code, named_by=call().named_by("data"))


def _add_option(values: dict[str, dict[str, Any]], types: dict[str, dict[str, type]], text: str) -> None:
    """Add name=value to the options of every defense that takes it."""
    key, equals, value = text.partition("=")
    takers = [defense for defense in types if key in types[defense]]
    if equals and not takers:
        owners = [name for name, entry in DEFENSES.items() if key in _option_types(entry.load())]
        if owners:
            raise InputError(f"{' and '.join(values)} has no option {key}; it belongs to {', '.join(owners)}")
    if not equals or not takers:
        names = dict.fromkeys(key for keys in types.values() for key in keys)
        own, hint = ", ".join(names) or "none", did_you_mean(key, names)
        raise InputError(f"--option takes name=value of the defense's own options ({own}), got {text!r}{hint}")
    for defense in takers:
        try:
            values[defense][key] = types[defense][key](value)
        except ValueError as error:
            raise InputError(f"--option {key} takes a number, got {value!r}") from error


def _option_types(defense: type[Any]) -> dict[str, type]:
    """A defense's own options and their types, without those of masks, which are options of the command."""
    from patchcleanser.defenses.mask_defense import MaskDefense

    options: dict[str, Parameter] = {}
    shared = signature(MaskDefense.__init__).parameters
    for parent in defense.__mro__:  # a class may pass **options on to its parent
        if "__init__" in vars(parent) and parent not in (MaskDefense, object):
            parameters = signature(vars(parent)["__init__"]).parameters.values()
            options = {**{p.name: p for p in parameters if p.kind is Parameter.KEYWORD_ONLY}, **options}
    return {name: type(p.default) for name, p in options.items() if p.default is not None and name not in shared}


def per_axis(text: str, option: str) -> tuple[int, int]:
    """6 or 6x4 as a number for each axis."""
    down, x, across = text.partition("x")
    try:
        pair = int(down), int(across if x else down)
    except ValueError:
        pair = 0, 0
    if min(pair) < 1:
        raise InputError(f"--{option} takes a whole number from 1, or one for each axis as 6x4, got {text!r}")
    return pair


def parse_threat(patch: str, patches: int, grid: str | None) -> Threat:
    """The threat of --patch, --patches and --grid."""
    from patchcleanser.core.threats import Threat

    return Threat.parse(patch, count=patches, grid=grid or "source")  # type: ignore[arg-type]  # checked by Threat
