"""The same work on a Ray cluster. With ray_pool.py, ray_worker.py and the serving twin all that imports ray.

**Who does what.** A pool of actors holds the classifier, once per worker, and each takes one task after the
other: it reads the next one while it works on the last. The driver hands out tasks and alone writes rows,
so the run folder, its lock and its way of going on are those of a local run, and need not be shared.

**Why actors, and Ray Data only for the first pass.** Ray Data reads the data once from everywhere, to hash
them; that is what it is good at: tasks without state and with tiny answers. For the rows themselves we tried
it (2.60) and left it: a task whose process dies is retried on the same actor for ever, so an image that
crashes the decoder stops the run, or, with a limit of retries, its block is left out with a line in a log
and other tasks queued on that actor lose retries too; and the rounds of one heavy image depend on each other.
Here a task that was lost goes back to the queue, and one that was lost twice is looked at, image by image.
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

from patchcleanser.cluster.pool import EACH, Pool
from patchcleanser.cluster.worker import put, unpacked

HASHED = 512
"""Images hashed by one task; fewer images in all are hashed by the driver itself."""


@dataclass
class RayRunner:
    """Work on a Ray cluster, or on a Ray of this machine's own if there is none.

    `workers` is by default as many as the cluster has room for. `make` loads the classifier on a worker
    if it cannot be sent there. Workers stay for the next job until `close`, or the end of a with.
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
            raise InputError(
                f"a worker has 0 or more GPUs and 1 or more CPUs, got {self.gpus_per_worker:g} and "
                f"{self.cpus_per_worker}"
            )

    def __enter__(self) -> RayRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the workers go, and stop Ray if it was started here."""
        self._let_go()
        if self._started:
            ray.shutdown()
            self._started = False

    def _let_go(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def begin(self, work: Workload[Any, Any]) -> dict[str, Any]:
        """As a worker says; the driver may have another kind of device, or none that is fit."""
        self._started = connect(self.address) or self._started
        dataset = work.job.dataset
        if dataset.remembers and len(dataset) > HASHED and "fingerprint" not in vars(dataset):
            self._let_go()  # or nobody would have a core to read with
            _hash_everywhere(dataset)
        dataset.fingerprint  # noqa: B018  # known before it is sent, so that no worker reads all images
        classifier, device = work.job.classifier, "cuda" if self.gpus_per_worker else "cpu"
        if classifier.device.type not in (device, "cpu"):
            raise InputError(
                f"the classifier is on {classifier.device} but workers have no GPU; give gpus_per_worker=1"
            )
        if self._pool is None:
            number = room_for(self.workers, cpus=self.cpus_per_worker, gpus=self.gpus_per_worker)
            self._pool = Pool(self._options(), number, (device, self.cpus_per_worker))
        if self._pool.model != classifier.fingerprint:
            self._pool.send(classifier.fingerprint, _sendable(classifier, self.make, device))
        return self._pool.begin(work)

    def results(self, work: Workload[Task, Result], tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        """In the order in which they are done."""
        pool = self._pool
        if pool is None or pool.work is not work:
            raise InputError("begin(work) comes before its results")
        try:
            yield from pool.results(work, tasks)
        except BaseException:  # Ctrl-C too: nobody would come for what the workers still do
            self._let_go()
            raise

    def _options(self) -> dict[str, Any]:
        return {
            "num_cpus": self.cpus_per_worker,
            "num_gpus": self.gpus_per_worker,
            "max_concurrency": EACH,
            "scheduling_strategy": "SPREAD",
        }


def connect(address: str | None) -> bool:
    """Use the cluster there, or start one on this machine; whether that was done now."""
    if ray.is_initialized():
        return False
    _require_reachable(address)
    os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")  # or Ray puts its own print in place of Python's
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=True)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ClusterError(f"cannot use a Ray cluster at {address or 'this machine'}: {error}") from error
    return True


def room_for(workers: int | None, *, cpus: int, gpus: float) -> int:
    """So many workers, or as many as the cluster has room for; ClusterError if that is too many."""
    wanted = {"CPU": cpus, "GPU": gpus}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(node.get(kind, 0) // need) for kind, need in wanted.items() if need) for node in nodes)
    if room < (workers or 1):
        has = ", ".join(f"{sum(node.get(kind, 0) for node in nodes):g} {kind}s" for kind in wanted)
        raise ClusterError(
            f"the cluster has room for {room} workers of {cpus} CPUs and {gpus:g} GPUs ({len(nodes)} nodes, {has}), "
            f"asked for {workers or 1}; ask for fewer, or add nodes"
        )
    return workers or room


def _hash_everywhere(dataset: Dataset) -> None:
    """The digest of every image, read through Ray Data on all nodes instead of by the driver alone."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it would tell its plans
    ray.data.DataContext.get_current().enable_progress_bars = False
    held = put(ray.cloudpickle.dumps(dataset))
    blocks = -(-len(dataset) // HASHED)
    numbers = ray.data.range(len(dataset), override_num_blocks=blocks)
    for row in numbers.map_batches(_digests, batch_size=HASHED, fn_kwargs={"held": [held]}).iter_rows():
        dataset.remember(row["index"], row["digest"])


def _digests(numbers: dict[str, Any], held: list[Any]) -> dict[str, Any]:
    dataset = unpacked(held[0])
    return {"index": numbers["id"], "digest": [dataset.digest(int(index)) for index in numbers["id"]]}


def _sendable(classifier: Classifier, make: Callable[[], Classifier] | None, device: str) -> list[Any]:
    """The classifier, or what makes it, in the object store."""
    movable = classifier.device.type == device or isinstance(classifier, TorchClassifier)
    if make is not None and not movable:
        return [put(ray.cloudpickle.dumps(make))]
    try:
        return [put(ray.cloudpickle.dumps(classifier))]
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        if make is None:
            raise InputError(
                f"this {type(classifier).__name__} cannot be sent to workers ({error}); give RayRunner a make= that "
                "loads it there"
            ) from error
        return [put(ray.cloudpickle.dumps(make))]


def _require_reachable(address: str | None) -> None:
    """Ray itself would try for a minute."""
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
