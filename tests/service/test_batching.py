"""The scheduler: label flows that come and go, and none that harms another."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from patchcleanser import CallableClassifier, DoubleMasking, Threat
from patchcleanser.engine import RecomputeError
from patchcleanser.errors import OutputError
from patchcleanser.service import batching
from patchcleanser.service.access import Capacity
from patchcleanser.service.batching import ScheduledImage, Scheduler
from patchcleanser.service.problems import RefusedError


def colours(x: torch.Tensor) -> torch.Tensor:
    return x.mean((2, 3)) + 0.2 * x[:, :, 0, 0] - x[:, :, 3, 5]


class Bench:
    """A defense, its scheduler, and an event that keeps the model from answering."""

    def __init__(self, model: Any = colours, together: int = 64) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.open.set()
        self.batches: list[tuple[int, int]] = []
        self.capacity = Capacity(images=1000)

        def gated(x: torch.Tensor) -> torch.Tensor:
            self.entered.set()
            assert self.open.wait(20)
            return model(x)

        self.defense = DoubleMasking(CallableClassifier(gated, array="torch"), Threat.square(2), masks=3)
        note = lambda images, labels, seconds: self.batches.append((images, labels))  # noqa: E731
        self.scheduler = Scheduler(self.defense.engine, together=together, on_batch=note)

    def schedule(self, seed: int, *, broken: bool = False, client: str = "") -> ScheduledImage:
        image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(seed))
        if broken:
            image[:] = 1.0
        (reservation,) = self.capacity.reserve(client, {"images": 1})
        return ScheduledImage(self.defense.image_state(image), self.defense.verdict_flow, False, reservation, client)

    def offline(self, seeds: range) -> list[Any]:
        images = [torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        reference = DoubleMasking(CallableClassifier(colours, array="torch"), Threat.square(2), masks=3)
        return reference.predict(images)


def test_what_arrives_while_the_model_works_is_one_batch() -> None:
    bench = Bench()
    bench.open.clear()
    first = bench.scheduler.submit([bench.schedule(0)])
    assert bench.entered.wait(20)
    rest = bench.scheduler.submit([bench.schedule(seed) for seed in range(1, 9)])
    bench.open.set()
    verdicts = [future.result(20) for future in first + rest]
    assert verdicts == bench.offline(range(9))
    assert bench.batches[0] == (1, 9)
    assert bench.batches[1][0] >= 8, "second rounds of the first beside first rounds of the others"


def test_a_long_certificate_does_not_keep_predictions_waiting() -> None:
    bench = Bench()
    bench.defense.engine.exact.chunk = 16
    bench.open.clear()
    long = bench.schedule(0)
    start = lambda table: bench.defense.certificate_flow(table, 0, maps=True)  # noqa: E731
    proof = ScheduledImage(long.state, start, True, long.reservation)
    (last,) = bench.scheduler.submit([proof])
    assert bench.entered.wait(20)
    ended: list[str] = []
    last.add_done_callback(lambda _: ended.append("certificate"))
    for future in bench.scheduler.submit([bench.schedule(9)]):  # two rounds; the certificate takes five
        future.add_done_callback(lambda _: ended.append("prediction"))
    bench.open.set()
    certificate = last.result(20)
    bench.scheduler.close()
    assert ended == ["prediction", "certificate"]
    assert max(labels for _, labels in bench.batches) <= 16
    reference = DoubleMasking(CallableClassifier(colours, array="torch"), Threat.square(2), masks=3)
    (expected,) = reference.certify([long.state.pixels], [0], maps=True)
    assert (certificate.certified, certificate.classifications) == (expected.certified, expected.classifications)


def ends(futures: dict[str, list[Future[Any]]]) -> list[str]:
    """Whose images end, in that order."""
    names: list[str] = []
    for name, some in futures.items():
        for future in some:
            future.add_done_callback(lambda _, name=name: names.append(name))
    return names


@pytest.mark.parametrize("strict", [False, True])
def test_a_client_with_many_images_does_not_keep_another_waiting(strict: bool) -> None:
    bench = Bench(together=4)
    bench.defense.engine.exact.chunk = 9  # the labels of one image
    start = (
        (lambda table: bench.defense.certificate_flow(table, 0, maps=True)) if strict else bench.defense.verdict_flow
    )

    def scheduled(client: str, seeds: range) -> list[ScheduledImage]:
        return [replace(bench.schedule(seed, client=client), start=start, strict=strict) for seed in seeds]

    bench.open.clear()
    futures = {"many": bench.scheduler.submit(scheduled("many", range(40)))}
    assert bench.entered.wait(20)
    futures["one"] = bench.scheduler.submit(scheduled("one", range(40, 41)))
    names = ends(futures)
    bench.open.set()
    bench.scheduler.close()
    assert len(names) == 41
    assert names.index("one") < 8


def test_large_pictures_take_turns_one_label_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label of a large photo takes a second: four in every step would be four seconds for whoever waits beside."""
    monkeypatch.setattr(batching, "NUMBERS", 3 * 30 * 30)
    bench = Bench()
    (reservation,) = bench.capacity.reserve("", {"images": 1})
    large = [
        ScheduledImage(
            bench.defense.image_state(torch.rand(3, 40, 40)), bench.defense.verdict_flow, False, reservation, client
        )
        for client in ("a", "a", "b", "b")
    ]
    futures = bench.scheduler.submit(large)
    names = ends({"a": futures[:2], "b": futures[2:]})
    bench.scheduler.close()
    assert set(bench.batches) == {(1, 1)}
    assert set(names[:2]) == {"a", "b"}


def test_no_more_images_are_worked_on_together_than_allowed() -> None:
    bench = Bench(together=3)
    futures = bench.scheduler.submit([bench.schedule(seed) for seed in range(10)])
    assert [future.result(20) for future in futures] == bench.offline(range(10))
    assert max(images for images, _ in bench.batches) <= 3


def test_large_pictures_get_few_labels_at_a_time_and_small_ones_beside_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that what nobody waits for any more is dropped after seconds, not when all its labels are there."""
    monkeypatch.setattr(batching, "NUMBERS", 2 * 10 * 3 * 8 * 8)
    bench = Bench()
    small = bench.schedule(0)
    state = bench.defense.image_state(torch.rand(3, 40, 40))
    large = ScheduledImage(state, bench.defense.verdict_flow, False, small.reservation)
    bench.open.clear()
    first = bench.scheduler.submit([large])
    assert bench.entered.wait(20)
    second = bench.scheduler.submit([small])
    bench.open.set()
    assert second[0].result(20) == bench.offline(range(1))[0]
    first[0].result(20)
    bench.scheduler.close()
    assert bench.batches[0] == (1, 1)
    assert bench.batches[1] == (2, 1 + 9)


def test_an_image_that_cannot_be_classified_fails_alone() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        if (x > 0.999).all(dim=1).any():
            raise ValueError("a white pixel")
        return colours(x)

    bench = Bench(breaks)
    futures = bench.scheduler.submit([bench.schedule(0), bench.schedule(1, broken=True), bench.schedule(2)])
    assert futures[0].result(20) == bench.offline(range(1))[0]
    with pytest.raises(OutputError, match="a white pixel"):
        futures[1].result(20)
    assert futures[2].result(20).label == bench.offline(range(3))[2].label
    bench.scheduler.close()
    assert bench.capacity.used("images") == 0


def test_cancelled_images_are_dropped_and_release_their_capacity() -> None:
    bench = Bench()
    bench.open.clear()
    (running,) = bench.scheduler.submit([bench.schedule(0)])
    assert bench.entered.wait(20)
    waiting = bench.scheduler.submit([bench.schedule(seed) for seed in range(1, 5)])
    for future in waiting:
        assert future.cancel()
    bench.open.set()
    running.result(20)
    bench.scheduler.close()
    assert bench.capacity.used("images") == 0
    assert all(images == 1 for images, _ in bench.batches), "nothing was computed for cancelled images"


def test_closing_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    bench = Bench()
    bench.open.clear()
    futures: list[Future[Any]] = bench.scheduler.submit([bench.schedule(seed) for seed in range(6)])
    closing = threading.Thread(target=bench.scheduler.close)
    closing.start()
    while bench.scheduler.alive:
        pass
    with pytest.raises(RefusedError, match="shutting down"):
        bench.scheduler.submit([bench.schedule(7)])
    bench.open.set()
    closing.join(20)
    assert [future.result(0) for future in futures] == bench.offline(range(6))


def test_labels_that_cannot_stand_are_computed_again_for_everything_in_play(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    real, calls = bench.defense.engine.compute, []

    def caught_once(requests: Any, *, strict: bool) -> None:
        calls.append(len(requests))
        real(requests, strict=strict)
        if len(calls) == 2:
            for request in requests:
                request.image.table.labels[:] = 2  # what fast labels might have said
            raise RecomputeError

    monkeypatch.setattr(bench.defense.engine, "compute", caught_once)
    futures = bench.scheduler.submit([bench.schedule(seed) for seed in range(5)])
    assert [future.result(20) for future in futures] == bench.offline(range(5))
    assert len(calls) > 3


def test_capacity_is_released_once() -> None:
    capacity = Capacity(images=2)
    first, second = capacity.reserve("", {"images": 1}, {"images": 1})
    first.release()
    first.release()
    assert capacity.used("images") == 1
    second.release()
    assert capacity.used("images") == 0
