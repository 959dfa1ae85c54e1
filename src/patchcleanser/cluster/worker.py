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
"""Images that a worker reads before its first task, to check that its node has the same data."""
MAX_DEATHS = 3
"""An image that so many processes died of is deadly."""


class Worker:
    """One process of the pool, with the classifier on the device that Ray gave it.

    Every method that needs the work gets its number, and its reference in a list.
    """

    def __init__(self, device: str, threads: int) -> None:
        self.device, self.threads = device, threads
        self.working, self.unpacking = threading.Lock(), threading.Lock()
        self.current: tuple[int, Workload[Any, Any]] | None = None
        self.loaded = 0
        self.tags = {"node": socket.gethostname()}
        tags = ("node",)
        self.images = Counter("patchcleanser_images", "Images whose rows are done", tag_keys=tags)
        self.tasks = Counter("patchcleanser_tasks", "Tasks done", tag_keys=tags)
        self.seconds = Histogram(
            "patchcleanser_task_seconds", "Time of a task", boundaries=[0.1, 1, 10, 60, 600], tag_keys=tags
        )

    def ready(self, number: int, refs: list[Any]) -> None:
        """Load the classifier; of two that are loaded at the same time the one sent later counts."""
        torch.set_num_threads(self.threads)
        content = pickle.loads(ray.get(refs[0]))
        with self.unpacking:
            if number > self.loaded:
                self.classifier = _moved(content if isinstance(content, Classifier) else content(), self.device)
                self.loaded, self.current = number, None

    def identity(self, number: int, refs: list[Any], check: bool) -> dict[str, Any]:
        """What decides the results here."""
        work = self._work(number, refs)
        if check:
            work.check()
        return work.identity

    def agree(self, number: int, refs: list[Any], identity: dict[str, Any]) -> None:
        """Refuse to work where results would differ: another device, another model, other data."""
        work, node = self._work(number, refs), socket.gethostname()
        for name, value in work.identity.items():
            if value != identity[name]:
                raise ClusterError(
                    f"node {node} would give other rows: its {name} is {value!r}, elsewhere it is {identity[name]!r}; "
                    "use nodes of one kind, with the same software"
                )
        dataset = work.job.base.dataset
        for index in range(0, len(dataset), -(-len(dataset) // SPOT_CHECKS)):
            if dataset.digest(index) != UNREADABLE:
                try:
                    dataset.content(index)
                except DataError as error:
                    raise DataError(
                        f"node {node} cannot read {dataset.name} as the driver can: {error}; put the data where every "
                        "node finds them under the same address"
                    ) from error

    def do(self, number: int, refs: list[Any], task: Any) -> Any:
        """Do one task. Two may be here at a time: one is read while the other is worked on."""
        work = self._work(number, refs)
        content = work.read(task)
        with self.working:
            started = time.monotonic()
            torch.set_num_threads(self.threads)  # in this thread too
            result = work.process(task, content)
            self.tasks.inc(tags=self.tags)
            self.images.inc(len(getattr(task, "indices", getattr(task, "rows", ()))), tags=self.tags)
            self.seconds.observe(time.monotonic() - started, tags=self.tags)
        return result

    def _work(self, number: int, refs: list[Any]) -> Workload[Any, Any]:
        with self.unpacking:
            if self.current is None or self.current[0] != number:
                self.current = number, _Unpickler(ray.get(refs[0]), self.classifier).load()
            return self.current[1]


def find_deadly(refs: list[Any], indices: Sequence[int]) -> list[int]:
    """The images that kill every process that reads them: one death may have another cause."""
    remote: Any = ray.remote(num_cpus=0, max_retries=MAX_DEATHS - 1)(_read)
    deadly = []
    for index in indices:
        try:
            fetch(remote.remote(refs, index))
        except RayError:
            try:
                fetch(remote.remote(refs, None))  # is it this image, or opening the data?
            except RayError as error:
                raise ClusterError(f"processes that read images die before they read one: {summary(error)}") from error
            deadly.append(index)
    return deadly


def _read(refs: list[Any], index: int | None) -> None:
    """Open the data, and read one image of them."""
    dataset = unpack(refs[0]).job.base.dataset
    if index is not None:
        with suppress(PatchCleanserError):  # left to the task that reads it
            dataset.image(index)


class _Pickler(ray.cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves out the classifier, which the workers have."""

    def persistent_id(self, thing: Any) -> str | None:
        return "classifier" if isinstance(thing, Classifier) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, classifier: Classifier | None) -> None:
        super().__init__(io.BytesIO(content))
        self.classifier = classifier

    def persistent_load(self, name: str) -> Classifier | None:
        return self.classifier


def pack(work: Workload[Any, Any]) -> bytes:
    """A work as bytes, without its classifier."""
    content = io.BytesIO()
    _Pickler(content).dump(work)
    return content.getvalue()


@lru_cache(maxsize=1)
def unpack(ref: Any) -> Any:
    """What a reference holds, for a process that has no classifier."""
    return _Unpickler(ray.get(ref), None).load()


def put(content: bytes) -> Any:
    """Put bytes into the object store, for all workers to fetch."""
    try:
        return ray.put(content)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise ClusterError(
            f"Ray's object store has no room for {len(content):,} bytes, in memory or on disk; free some, or give "
            "`ray start` a larger --object-store-memory"
        ) from error


def fetch(ref: Any) -> Any:
    """What a worker returned. Raises what it raised; RayError means that it is dead."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, (PatchCleanserError, RayError)):  # Ray's own: what it was sent did not reach it
            raise cause from error
        raise ClusterError(f"a worker failed: {summary(error)}") from error


def kill(actor: Any) -> None:
    """End a worker, if it is still there."""
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


def summary(error: BaseException) -> str:
    """The line of an error that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if isinstance(error, RayTaskError) else lines[0] if lines else type(error).__name__)[:300]
