"""A pool of workers on a Ray cluster: hands out tasks, repeats lost ones, replaces dead workers."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError

from patchcleanser.cluster.worker import Worker, fetch, find_deadly, kill, pack, put, summary
from patchcleanser.errors import ClusterError, DataError
from patchcleanser.evaluation.workloads import Batch, Workload

TASKS_PER_WORKER = 2
"""One that it works on, one that it reads."""
SUSPECT_LOSSES = 2
"""The images of a task that was lost so often are read one by one."""
MAX_LOSSES = 20
"""A task that was lost so often ends the run; so do workers that die so often before they ever work."""
START_SECONDS = 300.0
"""To wait for the first worker."""
SLOW_FACTOR = 4.0
"""A task that takes so many times the median is given to an idle worker too, when nothing else is left."""


@dataclass(eq=False)
class _Member:
    """A worker as the driver sees it."""

    actor: Any
    promise: Any
    """A pending call: it becomes ready, or agrees to a work. None if there is none."""
    requested: int = 0
    """The number of the work that this call is about; 0 is to become ready."""
    agreed: int = -1
    tasks: int = 0


@dataclass
class _Tasks:
    """Tasks that wait, run and are done; each with its number."""

    queue: deque[tuple[int, Any]]
    running: dict[Any, tuple[_Member, tuple[int, Any], float]] = field(default_factory=dict)
    losses: Counter[int] = field(default_factory=Counter)
    cleaned: dict[int, Any] = field(default_factory=dict)
    """Tasks without the images that kill their reader; a copy from before may be lost after that."""
    seconds: list[float] = field(default_factory=list)
    done: set[int] = field(default_factory=set)

    def late(self) -> tuple[int, Any] | None:
        """A task that takes far longer than others did: its node may be frozen."""
        copies = Counter(number for _, (number, _), _ in self.running.values())
        median = statistics.median(self.seconds) if self.seconds else START_SECONDS
        for _, item, since in self.running.values():
            if (
                copies[item[0]] == 1
                and item[0] not in self.done
                and time.monotonic() - since > 1 + SLOW_FACTOR * median
            ):
                return item
        return None


class Pool:
    """Workers, replaced as they die, and the tasks they have."""

    def __init__(self, options: dict[str, Any], size: int, settings: tuple[str, int]) -> None:
        self.size, self.settings = size, settings
        self.fingerprint, self.classifiers = "", 0
        self.classifier: list[Any] = []
        self.remote: Any = ray.remote(**options)(Worker)
        self.members: list[_Member] = []
        self.deaths = 0
        self.number = 0
        self.refs: list[Any] = []
        """The work in the object store, in a list because Ray would fetch a bare reference for each call."""
        self.work: Workload[Any, Any] | None = None
        self.identity: dict[str, Any] = {}

    def close(self) -> None:
        for member in self.members:
            kill(member.actor)
        self.members = []

    def send(self, fingerprint: str, classifier: list[Any]) -> None:
        """Give all workers this classifier."""
        self.fingerprint, self.classifier = fingerprint, classifier
        self.classifiers += 1
        for member in self.members:
            member.agreed, member.requested = -1, 0
            member.promise = member.actor.ready.remote(self.classifiers, classifier)

    def begin(self, work: Workload[Any, Any]) -> dict[str, Any]:
        """Send the work, and get its identity from the first worker that is ready."""
        self.number += 1
        self.refs = [put(pack(work))]
        self.work, self.identity = work, {}
        check = True
        while not self.identity:
            member = self._first_ready()
            try:
                self.identity = fetch(member.actor.identity.remote(self.number, self.refs, check))
            except RayError as error:
                check = False  # perhaps the first image killed it: that is found out when it is its turn
                self._remove(member, error)
        if self.identity["classifier"] != self.fingerprint:
            raise ClusterError(
                "the model that workers load is not the driver's; give all of them the same files and software"
            )
        return self.identity

    def results(self, work: Workload[Any, Any], tasks: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Every task with its result, once."""
        state = _Tasks(deque(enumerate(tasks)))
        for member in self.members:
            member.tasks = 0  # a late task that was done twice may still be at one; nobody waits for it
        while len(state.done) < len(tasks):
            self._replenish()
            self._hand_out(state)
            for ref in self._wait(state.running):
                member, (number, task), since = state.running.pop(ref)
                member.tasks -= 1
                try:
                    result = fetch(ref)
                except RayError as error:
                    self._remove(member, error)
                    if number not in state.done:
                        self._requeue(work, state, number, task, error)
                    continue
                self.deaths = 0
                if number not in state.done:  # a slow task may have been done twice
                    state.done.add(number)
                    state.seconds.append(time.monotonic() - since)
                    yield task, result

    def _first_ready(self) -> _Member:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            self._replenish()
            for member in self.members:
                if member.promise is None and member.agreed >= 0:
                    return member
            self._wait({})
        raise ClusterError(
            f"no worker could start within {START_SECONDS:g} s; other work may hold the cluster's CPUs and GPUs; "
            "see: ray status"
        )

    def _replenish(self) -> None:
        """Start workers for those that died; Ray starts them when there are resources. All must agree to the work."""
        while len(self.members) < self.size:
            actor = self.remote.remote(*self.settings)
            self.members.append(_Member(actor, actor.ready.remote(self.classifiers, self.classifier)))
        for member in self.members:
            if self.identity and member.promise is None and member.agreed != self.number:
                member.requested = self.number
                member.promise = member.actor.agree.remote(self.number, self.refs, self.identity)

    def _wait(self, running: Mapping[Any, Any]) -> list[Any]:
        """Wait for a call to end, at most a second; return the tasks that ended, and settle workers' promises."""
        promises = {member.promise: member for member in self.members if member.promise is not None}
        ended = ray.wait([*running, *promises], num_returns=1, timeout=1.0)[0]
        for member in (promises[ref] for ref in ended if ref in promises):
            try:
                fetch(member.promise)
            except RayError as error:
                self._remove(member, error)
            else:
                member.agreed, member.promise = member.requested, None
        return [ref for ref in ended if ref in running]

    def _hand_out(self, state: _Tasks) -> None:
        ready = [m for m in self.members if m.promise is None and m.agreed == self.number]
        for member in sorted(ready, key=lambda m: m.tasks):
            # A worker gets a second task only if there are enough for all.
            while state.queue and member.tasks < (TASKS_PER_WORKER if len(state.queue) > len(ready) else 1):
                self._start(member, state, state.queue.popleft())
            late = state.late() if not state.queue and member.tasks == 0 else None
            if late is not None:
                self._start(member, state, late)

    def _start(self, member: _Member, state: _Tasks, item: tuple[int, Any]) -> None:
        ref = member.actor.do.remote(self.number, self.refs, item[1])
        member.tasks += 1
        state.running[ref] = (member, item, time.monotonic())

    def _remove(self, member: _Member, error: Exception) -> None:
        """Remove a dead worker."""
        if member not in self.members:
            return
        self.members.remove(member)
        kill(member.actor)
        self.deaths += 1
        if self.deaths > MAX_LOSSES + 2 * self.size:
            raise ClusterError(
                f"{self.deaths} workers died one after the other and no task was done; the last one: {summary(error)}"
            )

    def _requeue(self, work: Workload[Any, Any], state: _Tasks, number: int, task: Any, error: Exception) -> None:
        """Put a lost task back into the queue; of one that was lost more than once, without its deadly images."""
        state.losses[number] += 1
        if state.losses[number] >= MAX_LOSSES:
            name = f"batch {task.number}" if isinstance(task, Batch) else f"task {number}"
            raise ClusterError(
                f"{name} was lost {MAX_LOSSES} times, each time with its worker; the last time: {summary(error)}"
            )
        if state.losses[number] == SUSPECT_LOSSES and isinstance(task, Batch):
            deadly = find_deadly(self.refs, task.indices)
            if deadly and not getattr(work, "skip", False):
                names = ", ".join(work.job.base.dataset.id(index) for index in deadly)
                raise DataError(
                    f"reading {names} kills the process; leave such images out with --unreadable skip "
                    "(in Python skip=True)"
                )
            state.cleaned[number] = replace(task, left_out=dict.fromkeys(deadly, "reading it kills the process"))
        state.queue.append((number, state.cleaned.get(number, task)))
