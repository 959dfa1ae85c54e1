"""Workloads on a Ray cluster.

A pool of actors holds the classifier, one copy per worker. Each takes one task after the other, and reads the next one
while it works on the last. The driver hands out tasks and alone writes rows, so run folders are those of local runs.

Ray Data only hashes the data, in one pass over all nodes. It does not run the tasks: one whose process dies it retries
on the same actor for ever, or leaves out, so an image that crashes its decoder would stop the run or cost other rows.
Here a lost task goes back to the queue, and the images of one that was lost twice are read one by one.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.data.dataset import Dataset
from patchcleanser.errors import ClusterError, InputError, MissingDependencyError
from patchcleanser.evaluation.workloads import Result, Task, Workload

try:
    import ray
except ImportError as error:
    raise MissingDependencyError.of("ray", "ray") from error

from patchcleanser.cluster.pool import TASKS_PER_WORKER, Pool
from patchcleanser.cluster.worker import put, unpack

HASHED = 512
"""Images hashed by one task; fewer images in all are hashed by the driver itself."""


@dataclass
class RayRunner:
    """Runs workloads on a Ray cluster, or on a Ray of this machine's own if there is none.

    `workers` is by default as many as the cluster has resources for. `make` loads the classifier on a
    worker if it cannot be sent there. Workers stay for the next job until `close`, or the end of a with.
    """

    address: str | None = None
    workers: int | None = None
    gpus_per_worker: float = 0
    cpus_per_worker: int = 1
    """Cores, and threads, of a worker. The number of threads decides how sums are rounded."""
    make: Callable[[], Classifier] | None = None
    _pool: Pool | None = field(default=None, init=False, repr=False)
    _started: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise InputError(f"at least 1 worker is needed, got {self.workers}")
        if self.gpus_per_worker < 0 or self.cpus_per_worker < 1:
            counts = f"{self.gpus_per_worker:g} and {self.cpus_per_worker}"
            raise InputError(f"a worker has 0 or more GPUs and 1 or more CPUs, got {counts}")

    def __enter__(self) -> RayRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, and Ray if it was started here."""
        self._end_workers()
        if self._started:
            ray.shutdown()
            self._started = False

    def _end_workers(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def begin(self, work: Workload[Any, Any]) -> dict[str, Any]:
        """The identity of the work on a worker; the driver may have another kind of device."""
        self._started = connect(self.address) or self._started
        dataset = work.job.base.dataset
        if dataset.remembers and len(dataset) > HASHED and "fingerprint" not in vars(dataset):
            self._end_workers()  # its workers hold the cores that reading needs
            _hash_on_cluster(dataset)
        dataset.fingerprint  # noqa: B018  # known before it is sent, so that no worker reads all images
        classifier, device = work.job.base.model, "cuda" if self.gpus_per_worker else "cpu"
        if classifier.device.type not in (device, "cpu"):
            raise InputError(
                f"the classifier is on {classifier.device} but workers have no GPU; give gpus_per_worker=1"
            )
        if self._pool is None:
            resources = {"num_cpus": self.cpus_per_worker, "num_gpus": self.gpus_per_worker}
            options = {**resources, "max_concurrency": TASKS_PER_WORKER, "scheduling_strategy": "SPREAD"}
            size = worker_count(self.workers, cpus=self.cpus_per_worker, gpus=self.gpus_per_worker)
            self._pool = Pool(options, size, (device, self.cpus_per_worker))
        if self._pool.fingerprint != classifier.fingerprint:
            self._pool.send(classifier.fingerprint, [put(_pack(classifier, self.make, device))])
        return self._pool.begin(work)

    def results(self, work: Workload[Task, Result], tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        """Tasks with their results, in the order in which they are done."""
        pool = self._pool
        if pool is None or pool.work is not work:
            raise InputError("begin(work) comes before its results")
        try:
            yield from pool.results(work, tasks)
        except BaseException:  # Ctrl-C too: nobody would come for what the workers still do
            self._end_workers()
            raise


def connect(address: str | None) -> bool:
    """Use the cluster there, or start one on this machine; True if Ray was not connected before."""
    if ray.is_initialized():
        return False
    _require_reachable(address)
    os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")  # or Ray puts its own print in place of Python's
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=True)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ClusterError(f"cannot use a Ray cluster at {address or 'this machine'}: {error}") from error
    return True


def worker_count(workers: int | None, *, cpus: int, gpus: float) -> int:
    """So many workers, or as many as the cluster has resources for; ClusterError if that is too many."""
    needs = {"CPU": cpus, "GPU": gpus}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = sum(min(int(node.get(kind, 0) // need) for kind, need in needs.items() if need) for node in nodes)
    if most < (workers or 1):
        has = ", ".join(f"{sum(node.get(kind, 0) for node in nodes):g} {kind}s" for kind in needs)
        raise ClusterError(
            f"the cluster has room for {most} workers of {cpus} CPUs and {gpus:g} GPUs ({len(nodes)} nodes, {has}), "
            f"asked for {workers or 1}; ask for fewer, or add nodes"
        )
    return workers or most


def _hash_on_cluster(dataset: Dataset) -> None:
    """Give a dataset the digest of every image, read through Ray Data on all nodes."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it would print its plans
    ray.data.DataContext.get_current().enable_progress_bars = False
    refs = [put(ray.cloudpickle.dumps(dataset))]
    numbers = ray.data.range(len(dataset), override_num_blocks=-(-len(dataset) // HASHED))
    for row in numbers.map_batches(_digests, batch_size=HASHED, fn_kwargs={"refs": refs}).iter_rows():
        dataset.remember(row["index"], row["digest"])


def _digests(numbers: dict[str, Any], refs: list[Any]) -> dict[str, Any]:
    dataset = unpack(refs[0])
    return {"index": numbers["id"], "digest": [dataset.digest(int(index)) for index in numbers["id"]]}


def _pack(classifier: Classifier, make: Callable[[], Classifier] | None, device: str) -> bytes:
    """The classifier, or the function that makes it, as bytes."""
    movable = classifier.device.type == device or isinstance(classifier, TorchClassifier)
    try:
        if movable or make is None:
            return bytes(ray.cloudpickle.dumps(classifier))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        if make is None:
            raise InputError(
                f"this {type(classifier).__name__} cannot be sent to workers ({error}); give RayRunner a make= that "
                "loads it there"
            ) from error
    return bytes(ray.cloudpickle.dumps(make))


def _require_reachable(address: str | None) -> None:
    """Check that a cluster answers; Ray itself would try for a minute."""
    address = address or os.environ.get("RAY_ADDRESS")
    if address in (None, "", "auto", "local"):
        return
    host, _, port = str(address).rpartition(":")
    if "://" in str(address) or not host or not port.isdigit():
        raise InputError(
            f"an address is auto, local or HOST:PORT of the cluster's head, got {address!r}; from outside of the "
            "cluster use: ray job submit"
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); start one with: ray start --head"
        ) from error
