"""A pool of workers on a Ray cluster: tasks are handed out, lost ones again, dead workers replaced."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError

from patchcleanser.cluster.worker import Worker, brief, deadly, got, kill, packed, put
from patchcleanser.errors import ClusterError, DataError
from patchcleanser.evaluation.workloads import Batch, Workload

EACH = 2
"""Tasks at a worker: one that it works on, one that it reads."""
SUSPECT = 2
"""A task that was lost so often is looked at image by image."""
HOPELESS = 20
"""A task that was lost so often ends the run; so do workers that die so often before they ever work."""
PATIENCE = 300.0
"""Seconds to wait for the first worker."""
SLOW = 4.0
"""A task that takes so many times the usual is given to an idle worker too, when nothing else is left."""


@dataclass(eq=False)
class _Member:
    """A worker as the driver sees it."""

    actor: Any
    promise: Any = None
    """That it will be ready, or agree to a work; None if it owes nothing."""
    asked: int = 0
    """The work it was last asked to agree to; 0 is to be ready at all."""
    agreed: int = -1
    tasks: int = 0

    def ask(self, number: int, promise: Any) -> None:
        """What it owes now."""
        self.asked, self.promise = number, promise


@dataclass
class _Tasks:
    """What is to do, under way and done."""

    queue: deque[tuple[int, Any]]
    running: dict[Any, tuple[_Member, tuple[int, Any], float]] = field(default_factory=dict)
    lost: Counter[int] = field(default_factory=Counter)
    looked_at: dict[int, Any] = field(default_factory=dict)
    """Tasks without the images that kill their reader; a copy from before may be lost after that."""
    took: list[float] = field(default_factory=list)
    done: set[int] = field(default_factory=set)

    def late(self) -> tuple[int, Any] | None:
        """A task that takes far longer than others did: its node may be frozen."""
        copies = Counter(number for _, (number, _), _ in self.running.values())
        usual = statistics.median(self.took) if self.took else PATIENCE
        for _, item, since in self.running.values():
            if copies[item[0]] == 1 and item[0] not in self.done and time.monotonic() - since > 1 + SLOW * usual:
                return item
        return None


class Pool:
    """Workers, replaced as they die, and the tasks they have."""

    def __init__(self, options: dict[str, Any], wanted: int, settings: tuple[str, int]) -> None:
        self.wanted, self.settings = wanted, settings
        self.model, self.models = "", 0
        self.classifier: list[Any] = []
        self.remote: Any = ray.remote(**options)(Worker)
        self.members: list[_Member] = []
        self.deaths = 0
        self.number = 0
        self.held: list[Any] = []
        self.work: Workload[Any, Any] | None = None
        self.identity: dict[str, Any] = {}

    def close(self) -> None:
        """Let all workers go."""
        for member in self.members:
            kill(member.actor)
        self.members = []

    def send(self, fingerprint: str, held: list[Any]) -> None:
        """From now on all workers have this classifier."""
        self.model, self.classifier = fingerprint, held
        self.models += 1
        for member in self.members:
            member.agreed = -1
            member.ask(0, member.actor.ready.remote(self.models, held))

    def begin(self, work: Workload[Any, Any]) -> dict[str, Any]:
        """Send the work, and ask the first worker that is ready what decides its results."""
        self.number += 1
        self.held = [put(packed(work))]
        self.work, self.identity = work, {}
        check = True
        while not self.identity:
            member = self._first()
            try:
                self.identity = got(member.actor.identity.remote(self.number, self.held, check))
            except RayError as error:
                check = False  # perhaps the first image killed it: that is found out when it is its turn
                self._bury(member, error)
        if self.identity["classifier"] != self.model:
            raise ClusterError(
                "the model that workers load is not the driver's; give all of them the same files and software"
            )
        return self.identity

    def results(self, work: Workload[Any, Any], tasks: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Every task's result, once."""
        state = _Tasks(deque(enumerate(tasks)))
        for member in self.members:
            member.tasks = 0  # a late task that was done twice may still be at one; nobody waits for it
        while len(state.done) < len(tasks):
            self._keep_up()
            self._hand_out(state)
            for ref in self._wait(state.running):
                member, (number, task), since = state.running.pop(ref)
                member.tasks -= 1
                try:
                    result = got(ref)
                except RayError as error:
                    self._bury(member, error)
                    if number not in state.done:
                        self._again(work, state, number, task, error)
                    continue
                self.deaths = 0
                if number not in state.done:  # a slow task may have been done twice
                    state.done.add(number)
                    state.took.append(time.monotonic() - since)
                    yield task, result

    def _first(self) -> _Member:
        """A worker that is ready, as soon as there is one."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            self._keep_up()
            for member in self.members:
                if member.promise is None and member.agreed >= 0:
                    return member
            self._wait({})
        raise ClusterError(
            f"no worker could start within {PATIENCE:g} s; other work may hold the cluster's CPUs and GPUs; "
            "see: ray status"
        )

    def _keep_up(self) -> None:
        """Start workers for those that died; they wait, if need be, until there is room. All must agree to the work."""
        while len(self.members) < self.wanted:
            member = _Member(self.remote.remote(*self.settings))
            member.ask(0, member.actor.ready.remote(self.models, self.classifier))
            self.members.append(member)
        for member in self.members:
            if self.identity and member.promise is None and member.agreed != self.number:
                member.ask(self.number, member.actor.agree.remote(self.number, self.held, self.identity))

    def _wait(self, running: Mapping[Any, Any]) -> list[Any]:
        """Until something happens: tasks that ended are returned, workers' promises are seen to."""
        promises = {member.promise: member for member in self.members if member.promise is not None}
        happened = ray.wait([*running, *promises], num_returns=1, timeout=1.0)[0]
        for ref in happened:
            if ref in promises:
                self._kept(promises[ref])
        return [ref for ref in happened if ref in running]

    def _kept(self, member: _Member) -> None:
        """A worker is ready, or agrees; or it is dead."""
        try:
            got(member.promise)
        except RayError as error:
            self._bury(member, error)
        else:
            member.agreed, member.promise = member.asked, None

    def _hand_out(self, state: _Tasks) -> None:
        ready = [m for m in self.members if m.promise is None and m.agreed == self.number]
        for member in sorted(ready, key=lambda m: m.tasks):
            # Who has a task gets another only if none of the others would go without.
            while state.queue and member.tasks < (EACH if len(state.queue) > len(ready) else 1):
                self._give(member, state, state.queue.popleft())
            late = state.late() if not state.queue and member.tasks == 0 else None
            if late is not None:
                self._give(member, state, late)

    def _give(self, member: _Member, state: _Tasks, item: tuple[int, Any]) -> None:
        ref = member.actor.do.remote(self.number, self.held, item[1])
        member.tasks += 1
        state.running[ref] = (member, item, time.monotonic())

    def _bury(self, member: _Member, error: Exception) -> None:
        """A worker is gone."""
        if member not in self.members:
            return
        self.members.remove(member)
        kill(member.actor)
        self.deaths += 1
        if self.deaths > HOPELESS + 2 * self.wanted:
            raise ClusterError(
                f"{self.deaths} workers died one after the other and no task was done; the last one: {brief(error)}"
            )

    def _again(self, work: Workload[Any, Any], state: _Tasks, number: int, task: Any, error: Exception) -> None:
        """A lost task goes back to the queue; one that was lost more than once is looked at."""
        state.lost[number] += 1
        if state.lost[number] >= HOPELESS:
            name = f"batch {task.number}" if isinstance(task, Batch) else f"task {number}"
            raise ClusterError(
                f"{name} was lost {HOPELESS} times, each time with its worker; the last time: {brief(error)}"
            )
        if state.lost[number] == SUSPECT and isinstance(task, Batch):
            deaths = deadly(self.held, task.indices)
            if deaths and not getattr(work, "skip", False):
                names = ", ".join(work.job.dataset.id(index) for index in deaths)
                raise DataError(f"reading {names} kills the process; leave such images out with --unreadable skip")
            state.looked_at[number] = replace(task, left_out=dict.fromkeys(deaths, "reading it kills the process"))
        state.queue.append((number, state.looked_at.get(number, task)))
