"""A worker of a Ray cluster: one process with the classifier, and what is sent to it."""

from __future__ import annotations

import io
import pickle
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import ray
import torch
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError
from ray.util.metrics import Counter, Histogram

from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.data.dataset import UNREADABLE
from patchcleanser.errors import ClusterError, DataError, InputError, PatchCleanserError
from patchcleanser.evaluation.workloads import Workload

SPOT_CHECKS = 3
"""So many images a worker reads before its first task, to see that its node has the same data."""
READERS = 10
"""So many processes may die before one of them reads."""


class Worker:
    """One process of the pool, with the classifier on the device that Ray gave it."""

    def __init__(self, device: str, threads: int) -> None:
        self.device, self.threads = device, threads
        self.working, self.unpacking = threading.Lock(), threading.Lock()
        self.known: tuple[int, Workload[Any, Any]] | None = None
        self.model = 0
        tags = ("node",)
        self.tags = {"node": socket.gethostname()}
        self.images = Counter("patchcleanser_images", "Images whose rows are done", tag_keys=tags)
        self.tasks = Counter("patchcleanser_tasks", "Tasks done", tag_keys=tags)
        self.seconds = Histogram(
            "patchcleanser_task_seconds", "Time of a task", boundaries=[0.1, 1, 10, 60, 600], tag_keys=tags
        )

    def ready(self, number: int, held: list[Any]) -> None:
        """Load the classifier; of two that are loaded at the same time the one sent later counts."""
        torch.set_num_threads(self.threads)
        loaded = pickle.loads(ray.get(held[0]))
        with self.unpacking:
            if number > self.model:
                self.classifier = _moved(loaded if isinstance(loaded, Classifier) else loaded(), self.device)
                self.model, self.known = number, None

    def identity(self, number: int, held: list[Any], check: bool) -> dict[str, Any]:
        """What decides the results here."""
        work = self._work(number, held)
        if check:
            work.check()
        return work.identity

    def agree(self, number: int, held: list[Any], identity: dict[str, Any]) -> None:
        """Refuse to work where the results would be others: another device, another model, other data."""
        work = self._work(number, held)
        for name, value in work.identity.items():
            if value != identity[name]:
                raise ClusterError(
                    f"node {socket.gethostname()} would give other rows: its {name} is {value!r}, elsewhere it is "
                    f"{identity[name]!r}; use nodes of one kind, with the same software"
                )
        dataset = work.job.dataset
        for index in range(0, len(dataset), -(-len(dataset) // SPOT_CHECKS)):
            if dataset.digest(index) != UNREADABLE:
                try:
                    dataset.content(index)
                except DataError as error:
                    raise DataError(
                        f"node {socket.gethostname()} cannot read {dataset.name} as the driver can: {error}; "
                        "put the data where every node finds them under the same address"
                    ) from error

    def do(self, number: int, held: list[Any], task: Any) -> Any:
        """One task. Two may be here at a time: one is read while the other is worked on."""
        work = self._work(number, held)
        read = work.read(task)
        with self.working:
            started = time.monotonic()
            torch.set_num_threads(self.threads)  # in this thread too
            result = work.process(task, read)
            self.tasks.inc(tags=self.tags)
            self.images.inc(len(getattr(task, "indices", getattr(task, "rows", ()))), tags=self.tags)
            self.seconds.observe(time.monotonic() - started, tags=self.tags)
        return result

    def _work(self, number: int, held: list[Any]) -> Workload[Any, Any]:
        with self.unpacking:
            if self.known is None or self.known[0] != number:
                self.known = number, _Unpacker(ray.get(held[0]), self.classifier).load()
            return self.known[1]


class Reader:
    """A process that reads images, and may die of it."""

    def open(self, held: list[Any]) -> None:
        """All that is needed to read but the image itself."""
        self.dataset = unpacked(held[0]).job.dataset

    def read(self, index: int) -> None:
        """One image; what can be said about it in words is said later."""
        with suppress(PatchCleanserError):
            self.dataset.image(index)


def deadly(held: list[Any], indices: Sequence[int]) -> list[int]:
    """The images that kill whoever reads them. A process that died may have been killed; twice, it was the image."""
    actor, found = _reader(held), []
    for index in indices:
        for attempt in (1, 2):
            try:
                got(actor.read.remote(index))
                break
            except RayError:
                actor = _reader(held)
                if attempt == 2:
                    found.append(index)
    kill(actor)
    return found


def _reader(held: list[Any]) -> Any:
    """One that is up, so that no image is blamed for a process that never began to read it."""
    remote: Any = ray.remote(num_cpus=0)(Reader)
    for _ in range(READERS):
        actor = remote.remote()
        with suppress(RayError):
            got(actor.open.remote(held))
            return actor
    raise ClusterError(f"{READERS} processes that were to read images died before they could")


class _Packer(ray.cloudpickle.Pickler):  # type: ignore[misc]
    """Everything but the classifier, which the workers have."""

    def persistent_id(self, thing: Any) -> str | None:
        return "classifier" if isinstance(thing, Classifier) else None


class _Unpacker(pickle.Unpickler):
    def __init__(self, content: bytes, classifier: Classifier | None) -> None:
        super().__init__(io.BytesIO(content))
        self.classifier = classifier

    def persistent_load(self, name: str) -> Classifier | None:
        return self.classifier


def packed(work: Workload[Any, Any]) -> bytes:
    """A work as it is sent."""
    content = io.BytesIO()
    _Packer(content).dump(work)
    return content.getvalue()


@lru_cache(maxsize=1)
def unpacked(ref: Any) -> Any:
    """What a process that has no classifier was sent."""
    return _Unpacker(ray.get(ref), None).load()


def put(content: bytes) -> Any:
    """Into the object store, for all workers to fetch."""
    try:
        return ray.put(content)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise ClusterError(
            f"Ray's object store has no room for {len(content):,} bytes, in memory or on disk; free some, or give "
            "`ray start` a larger --object-store-memory"
        ) from error


def got(ref: Any) -> Any:
    """What a worker returned. What it raised is raised here; RayError means that it is dead."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, (PatchCleanserError, RayError)):  # Ray's own: what it was sent did not reach it
            raise cause from error
        raise ClusterError(f"a worker failed: {brief(error)}") from error


def kill(actor: Any) -> None:
    """Let a worker go, if it is still there."""
    with suppress(Exception):  # it may be dead, or Ray gone
        ray.kill(actor)


def _moved(classifier: Classifier, device: str) -> Classifier:
    """The worker's own copy, on its device."""
    if classifier.device.type == device:
        return classifier
    if not isinstance(classifier, TorchClassifier):
        raise InputError(f"a {type(classifier).__name__} cannot be moved to {device}; give RayRunner a make=")
    classifier.module.to(device)
    classifier.device = torch.device(device)
    return classifier


def brief(error: BaseException) -> str:
    """The line that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if isinstance(error, RayTaskError) else lines[0] if lines else type(error).__name__)[:300]
