"""What certifying and predicting cost, ours against the authors' loop, in one run on one machine.

    python benchmarks/speed.py                      # CPU: tiny and MobileNetV2, a few minutes
    python benchmarks/speed.py --suite gpu          # CUDA: ViT-B/16, ResNetV2-50, ResMLP-24
    python benchmarks/speed.py --suite growth       # cost against masks, images and patches; gpu-growth: on a GPU

Rows go into results/speed/speed.json, each as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from authors import Authors
from measuring import flops, in_turns, memory_mb, peak, power, timed
from torch import Tensor

from patchcleanser import DoubleMasking, Threat, TorchClassifier, load_classifier, load_dataset
from patchcleanser.core.algorithms import LabelFlow, double_masking
from patchcleanser.core.label_table import LabelTable
from patchcleanser.core.results import Case, Verdict
from patchcleanser.engine.fast.backends import candidates_for
from patchcleanser.engine.float32 import strict_float32
from patchcleanser.engine.masking import PairBatch
from patchcleanser.errors import PatchCleanserError
from patchcleanser.records.provenance import versions

BATCH = 16
"""Images the authors' code works on at once when it certifies."""

MANY = 512
"""Images that ours works on at once on a GPU, as in a run."""

TASKS = ("labels", "table", "certify", "predict clean", "predict worst")

SEED = 0
"""Of random images and random weights."""

SAME = ("hardware", "model", "weights", "real_images", "task", "masks", "patches", "images")
"""Rows that are alike in these are of one kind."""

ALWAYS = ("ours_ms", "authors_ms", "ratio", "share_of_peak", "memory_mb", "labels_equal")
"""Every row has these; null where it was not measured."""


class Model(NamedTuple):
    """A network, the patch and the side of its input."""

    name: str
    spec: str
    patch: str
    side: int


SUITES = {
    "cpu": [
        Model("tiny", "zoo:tiny", "5", 32),
        Model("mobilenet_v2", "torchvision:mobilenet_v2?weights={mobilenet}", "2%", 224),
    ],
    "gpu": [
        Model("vit_base_patch16_224", "timm:vit_base_patch16_224?weights=none", "2%", 224),
        Model("resnetv2_50x1_bit", "timm:resnetv2_50x1_bit?weights=none", "2%", 224),
        Model("resmlp_24_224", "timm:resmlp_24_224?weights=none", "2%", 224),
        Model("resnet50", "python:patchcleanser.experiments.imagenet:resnet50", "2%", 224),
        Model("mobilenet_v2", "torchvision:mobilenet_v2?weights={mobilenet}", "2%", 224),
    ],
}
SUITES["growth"], SUITES["gpu-growth"] = SUITES["cpu"][:1], SUITES["gpu"][:3]


class WorstCase(DoubleMasking):
    """Double-masking as it goes when every mask disagrees: all second rounds are needed."""

    def _fine_flow(self, table: LabelTable) -> LabelFlow[Verdict]:
        yield table, table.masks()
        yield table, table.rows(range(len(table.mask_set)))
        return double_masking(table.one_mask_labels(), table.row_labels)


def images_of(side: int, number: int, data: str | None) -> list[Tensor]:
    """Real images where there are any of this size, else noise."""
    if side == 32 or data:
        dataset = load_dataset(data if data and side != 32 else "sample")
        return [dataset.image(i) for i in range(number)]
    draw = torch.Generator().manual_seed(SEED)
    return [torch.rand(3, side, side, generator=draw) for _ in range(number)]


def undefended(classifier: TorchClassifier, images: list[Tensor]) -> list[int]:
    """What the classifier says of the images as they are."""
    with torch.inference_mode(), strict_float32(classifier.device):
        prepared = (classifier.prepare(image[None].to(classifier.device)) for image in images)
        return [int(classifier.checked_logits(inputs).argmax()) for inputs in prepared]


def unchecked(defense: DoubleMasking, images: list[Tensor]) -> None:
    """The fast labels of whole tables, in the pieces in which `certify` asks for them, and nothing else.

    What was computed of images before is computed again.
    """
    engine = defense.engine
    backend = engine.calibration.stages[0].backend if engine.ready else engine.candidates[0][0]
    (subjects,) = defense._groups(images)
    unions = len(subjects[0].table.mask_set.unions)
    which = np.repeat(np.arange(len(subjects)), unions)
    with torch.inference_mode():
        pairs = PairBatch(subjects, which, np.tile(np.arange(unions), len(subjects)))
        for part in engine.runner.split(pairs, backend.chunks):
            engine.runner.logits(part, backend)


def tables_equal(defense: DoubleMasking, images: list[Tensor], authors: list[Tensor]) -> tuple[float, dict[str, Any]]:
    """Share of two-mask labels equal to those of the authors' loop."""
    examined = defense.examine(images, [0] * len(images), maps=True)
    index = examined[0].table.mask_set.unions.index
    first, second = np.triu_indices(len(index))
    ours = np.stack([e.table.labels[index[first, second]] for e in examined])
    theirs = torch.stack(authors, 1).cpu().numpy()
    stats = defense.engine.stats
    facts = {"rechecked": stats.rechecked, "audited": stats.audited, "labels": stats.labels}
    facts["settled_by_a_finer_way"] = stats.settled.total()
    facts["settled_by"] = dict(stats.settled)
    facts["first_by"] = type(defense.engine.calibration.stages[0].backend).__name__
    return float((ours == theirs).mean()), facts


def loaded(spec: str, device: str) -> TorchClassifier:
    """The network; one of chance is the same each time."""
    torch.manual_seed(SEED)
    classifier = load_classifier(spec, device=device)
    assert isinstance(classifier, TorchClassifier)
    if "weights=none" in spec:  # timm begins some heads with zeros, and then every label is a tie
        torch.nn.init.normal_(classifier.module.get_classifier().weight, std=0.02)  # type: ignore[operator]
    return classifier


def compile_first(defense: DoubleMasking, model: Model, images: list[Tensor]) -> None:
    """As in a run of 20,000 images, for which compiling pays; says how long the first call took."""
    defense.check_size((model.side, model.side))
    defense.hint_total_images(20_000)
    started = time.perf_counter()
    defense.certify(images, [0] * len(images), maps=True)
    print(json.dumps({"model": model.name, "first_call_s": round(time.perf_counter() - started, 1)}), flush=True)


class Task(NamedTuple):
    """What is timed: ours for so many images, and the authors' loop for so many."""

    ours: Callable[[], Any]
    images: int
    loop: Callable[[], Any]
    of: int


class Duel:
    """A network, ours and the authors' loop around it, and what was timed of the loop so far."""

    def __init__(self, model: Model, given: argparse.Namespace) -> None:
        self.model, self.given = model, given
        self.classifier = loaded(spec_of(model, given), "cuda" if given.suite == "gpu" else "cpu")
        self.device = self.classifier.device
        threat = Threat.parse(model.patch, grid="input")
        self.defense = DoubleMasking(self.classifier, threat, masks=6, precision="fast")
        self.worst = WorstCase(self.classifier, threat, masks=6, precision="fast")
        self.authors = Authors(self.classifier, self.defense, model.side)
        self.unions = len(self.defense.mask_set((model.side, model.side)).unions)
        self.images = images_of(model.side, BATCH, given.data)
        self.inputs = torch.cat([self.classifier.prepare(image[None].to(self.device)) for image in self.images])
        chance = "weights=none" in spec_of(model, given)
        many = 64 if chance else given.many  # margins of a network of chance are small: many labels are computed again
        self.more = images_of(model.side, many, given.data) if self.device.type == "cuda" else self.images
        self.theirs: list[Tensor] = []
        self.seconds: dict[Callable[[], Any], float] = {}
        """An image of each loop that was timed."""
        self.bare: dict[int, float] = {}
        """An image of the network without any defense, by how many are asked for at once."""

    def warm_up(self) -> None:
        """Compile, calibrate, and make the kernels of the authors' batch."""
        blocks = any(self.wants(name) for name in TASKS if not name.startswith("predict"))
        if self.device.type == "cuda" and blocks:
            compile_first(self.defense, self.model, self.images)
        self.defense.calibrate(self.more)  # without it predictions are exact
        if self.wants("predict worst"):
            self.worst.calibrate(self.more)
        self.authors.clean(self.inputs)
        self.peak, self.flops = peak(self.device), flops(self.classifier, self.inputs)

    def wants(self, name: str) -> bool:
        """Whether a task was asked for."""
        return not self.given.tasks or name in self.given.tasks

    def their_table(self) -> None:
        """The authors' labels, kept to be compared with."""
        self.theirs[:] = self.authors.table(self.inputs)

    def tasks(self) -> dict[str, Task]:
        """Those that were asked for, by name."""
        defense, more, some = self.defense, self.more, self.more[:256]  # labels take as long for each image
        labels = undefended(self.classifier, more)
        loop, image = self.their_table, self.images[:1]
        tasks = {
            "labels": Task(lambda: unchecked(defense, some), len(some), loop, BATCH),
            "table": Task(lambda: defense.certify(more, labels, maps=True), len(more), loop, BATCH),
            "certify": Task(lambda: defense.certify(more, labels), len(more), loop, BATCH),
            "predict clean": Task(lambda: defense.predict(image), 1, lambda: self.authors.clean(self.inputs[:1]), 1),
            "predict worst": Task(lambda: self.worst.predict(image), 1, lambda: self.authors.worst(self.inputs[:1]), 1),
        }
        if self.wants("predict clean"):  # of one whose masks agree, as they do for most images
            agreed = next((i for i in self.images if defense.predict([i])[0].case is Case.AGREED), image[0])
            tasks["predict clean"] = tasks["predict clean"]._replace(ours=lambda: defense.predict([agreed]))
        return {name: task for name, task in tasks.items() if self.wants(name)}

    def timed(self, name: str, task: Task) -> tuple[float, list[float]]:
        """Seconds of ours, and the ratios of turns if it was timed in turns with the loop, which is timed once."""
        once: dict[str, Any] = {"repeats": 1, "warm": False} if self.model.side > 32 else {}
        if name == "predict clean":
            ours, self.seconds[task.loop], turns = in_turns(task.ours, task.loop, self.device)
            return ours, turns
        own = {"repeats": 1} if name.startswith("labels") else once if task.images > 1 else {"repeats": 8}
        return timed(task.ours, self.device, **own), []

    def time_loop(self, name: str, task: Task) -> float:
        """Seconds of the authors' loop, an image."""
        if task.loop not in self.seconds:
            once = self.model.side > 32 and (task.images > 1 or name == "predict worst")
            self.seconds[task.loop] = timed(task.loop, self.device, 1 if once else 3, warm=not once) / task.of
        return self.seconds[task.loop]

    def time_bare(self, task: Task) -> float:
        """Seconds of the network without any defense, an image: one alone, or as many as the authors' loop takes."""
        number = min(task.images, BATCH)
        if number not in self.bare:
            inputs = self.inputs[:number]
            self.bare[number] = timed(lambda: self.authors.undefended(inputs), self.device, 8) / number
        return self.bare[number]

    def row(self, name: str, task: Task) -> dict[str, Any]:
        """One task, timed."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with power(self.device) as watts:
            ours, turns = self.timed(name, task)
        memory, theirs, bare = memory_mb(self.device), self.time_loop(name, task), self.time_bare(task)
        row: dict[str, Any] = {
            **setting(self.model, self.given, self.classifier),
            "task": name,
            "images": task.images,
            "ours_ms": round(1000 * ours / task.images, 3),
            "authors_ms": round(1000 * theirs, 3),
            "ratio": round(theirs * task.images / ours, 2),
            "undefended_ms": round(1000 * bare, 3),
            "times_undefended": round(ours / task.images / bare, 2),
            "memory_mb": memory,
            **({"ratios_in_turns": turns} if turns else {}),
        }
        if name == "table":
            equal, facts = tables_equal(self.defense, self.images, self.theirs)
            if watts:
                facts["joules_an_image"] = round(float(np.mean(watts)) * ours / task.images, 2)
            row |= {"labels_equal": equal, **facts, "gflops_an_image": round(self.flops * self.unions / 1e9, 1)}
        if name == "table" or name.startswith("labels"):
            speed = self.flops * self.unions * task.images / ours
            row["tflops"] = round(speed / 1e12, 3)
            row |= {"share_of_peak": round(speed / self.peak, 3)} if self.peak is not None else {}
        return row


def duel(model: Model, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All tasks, each row as soon as it is there."""
    both = Duel(model, given)
    both.warm_up()
    for name, task in both.tasks().items():
        yield both.row(name, task)


def growth(model: Model, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Cost against the number of masks, of images and of patches, beside the number of distinct unions.

    On a CPU in float32, which a single image uses anyway. On a GPU with the fastest backend and more images, because
    calibration takes as long for few.
    """
    gpu = given.suite == "gpu-growth"
    classifier = loaded(spec_of(model, given), "cuda" if gpu else "cpu")
    candidates = candidates_for(classifier)  # what was prepared for one set of masks serves all
    usual, side, numbers = (256, 6, (32, 64, 128, 512, 2048)) if gpu else (8, 4, (1, 2, 4, 16, 32))
    plans = [*((k, usual, 1) for k in (6, 5, 4, 3, 2)), *((side, n, 1) for n in numbers)]
    for masks, number, patches in [*plans, (2, usual // 4, 2), (3, usual // 4, 2)]:
        images = images_of(model.side, number, given.data)
        threat = Threat.parse(model.patch, count=patches, grid="input")
        defense = DoubleMasking(classifier, threat, masks=masks, precision="fast" if gpu else "exact")
        defense.engine.candidates = candidates
        unions = len(defense.mask_set((model.side, model.side)).unions)
        defense.hint_total_images(20_000)
        labels = undefended(classifier, images)
        defense.certify(images, labels, maps=True)
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(partial(defense.certify, images, labels, maps=True), classifier.device, 2, warm=False)
        yield {
            **setting(model, given, classifier),
            **{"task": "growth", "masks": masks, "patches": patches, "images": number, "unions": unions},
            "ours_ms": round(1000 * seconds / number, 2),
            "ms_a_union": round(1000 * seconds / number / unions, 4),
            "memory_mb": memory_mb(classifier.device),
        }


def spec_of(model: Model, given: argparse.Namespace) -> str:
    """Where the network and its weights are."""
    spec = model.spec.format(mobilenet=given.mobilenet or "none")
    return f"trained:{given.trained}/{model.name}" if given.trained else spec


def setting(model: Model, given: argparse.Namespace, classifier: TorchClassifier) -> dict[str, Any]:
    """What every row says."""
    return {
        "hardware": versions()["hardware"],
        "device": classifier.device.type,
        "threads": torch.get_num_threads(),
        "model": model.name,
        "weights": "random" if "weights=none" in spec_of(model, given) else "trained",
        "real_images": model.side == 32 or bool(given.data),
        "seed": SEED,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--suite", choices=[*SUITES], default="cpu")
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--tasks", nargs="*", help=f"only these: {', '.join(map(repr, TASKS))}")
    parser.add_argument("--data", help="real images for 224×224 networks, as for --data of certify")
    parser.add_argument("--trained", help="folder of trained networks, one folder each, instead of random weights")
    parser.add_argument("--many", type=int, default=MANY, help="images that ours works on at once on a GPU")
    parser.add_argument("--mobilenet", help="weight file of torchvision's mobilenet_v2")
    parser.add_argument("--out", type=Path, default=Path("results/speed/speed.json"))
    given = parser.parse_args()
    names = [model.name for model in SUITES[given.suite]]
    if wrong := set(given.models or []) - set(names):
        parser.error(f"--suite {given.suite} has no {', '.join(sorted(wrong))}; it has {', '.join(names)}")
    if wrong := set(given.tasks or []) - set(TASKS):
        parser.error(f"no task is called {', '.join(sorted(wrong))}; there are {', '.join(map(repr, TASKS))}")
    try:
        images_of(224, 1, given.data)  # before the first network, not after
    except PatchCleanserError as error:
        parser.error(f"--data: {error}")
    measure = growth if given.suite.endswith("growth") else duel
    try:
        for model in SUITES[given.suite]:
            if not given.models or model.name in given.models:
                for row in measure(model, given):
                    print(json.dumps(row), flush=True)
                    keep(row, given.out)  # at once: whatever comes next may end it
    except PatchCleanserError as error:
        parser.exit(2, f"error: {error}\n")


def keep(row: dict[str, Any], path: Path) -> None:
    """A row into the file, in place of an older one of the same kind."""
    words = shlex.join(re.sub(r"[^:]*/.*", "PATH", word) for word in sys.argv[1:])  # whose machine it was is nobody's
    rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    rows = [other for other in rows if any(other.get(k) != row.get(k) for k in SAME)]
    path.parent.mkdir(parents=True, exist_ok=True)
    stamped = {**dict.fromkeys(ALWAYS), **row, "command": f"python benchmarks/speed.py {words}", "versions": versions()}
    path.write_text(json.dumps([*rows, stamped], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
