"""The model worker: games that come and go, and none that harms another."""

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
from patchcleanser.service.batching import ClosedError, Work, Worker
from patchcleanser.service.room import Place, Room


def colours(x: torch.Tensor) -> torch.Tensor:
    return x.mean((2, 3)) + 0.2 * x[:, :, 0, 0] - x[:, :, 3, 5]


class Bench:
    """A defense, its worker, and a gate that keeps the model from answering."""

    def __init__(self, model: Any = colours, together: int = 64) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.open.set()
        self.batches: list[tuple[int, int]] = []
        self.room = Room(images=1000)

        def gated(x: torch.Tensor) -> torch.Tensor:
            self.entered.set()
            assert self.open.wait(20)
            return model(x)

        self.defense = DoubleMasking(CallableClassifier(gated, array="torch"), Threat.square(2), masks=3)
        note = lambda images, labels, seconds: self.batches.append((images, labels))  # noqa: E731
        self.worker = Worker(self.defense.engine, together=together, on_batch=note)

    def work(self, seed: int, *, broken: bool = False, client: str = "") -> Work:
        image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(seed))
        if broken:
            image[:] = 1.0
        return Work(self.defense.image_state(image), self.defense.verdict_flow, False, self.room.take(images=1), client)

    def offline(self, seeds: range) -> list[Any]:
        images = [torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        twin = DoubleMasking(CallableClassifier(colours, array="torch"), Threat.square(2), masks=3)
        return twin.predict(images)


def test_what_arrives_while_the_model_works_is_one_batch() -> None:
    bench = Bench()
    bench.open.clear()
    first = bench.worker.submit([bench.work(0)])
    assert bench.entered.wait(20)
    rest = bench.worker.submit([bench.work(seed) for seed in range(1, 9)])
    bench.open.set()
    verdicts = [future.result(20) for future in first + rest]
    assert verdicts == bench.offline(range(9))
    assert bench.batches[0] == (1, 9)
    assert bench.batches[1][0] >= 8, "second rounds of the first beside first rounds of the others"


def test_a_long_certificate_does_not_keep_predictions_waiting() -> None:
    bench = Bench()
    bench.defense.engine.exact.chunk = 16
    bench.open.clear()
    long = bench.work(0)
    proof = Work(long.subject, lambda table: bench.defense.certificate_flow(table, 0, maps=True), True, long.place)
    (last,) = bench.worker.submit([proof])
    assert bench.entered.wait(20)
    ended: list[str] = []
    last.add_done_callback(lambda _: ended.append("certificate"))
    for future in bench.worker.submit([bench.work(9)]):  # two rounds; the certificate takes five
        future.add_done_callback(lambda _: ended.append("prediction"))
    bench.open.set()
    certificate = last.result(20)
    bench.worker.close()
    assert ended == ["prediction", "certificate"]
    assert max(labels for _, labels in bench.batches) <= 16
    twin = DoubleMasking(CallableClassifier(colours, array="torch"), Threat.square(2), masks=3)
    (known,) = twin.certify([long.subject.pixels], [0], maps=True)
    assert (certificate.certified, certificate.classifications) == (known.certified, known.classifications)


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

    def works(client: str, seeds: range) -> list[Work]:
        return [replace(bench.work(seed, client=client), start=start, strict=strict) for seed in seeds]

    bench.open.clear()
    futures = {"many": bench.worker.submit(works("many", range(40)))}
    assert bench.entered.wait(20)
    futures["one"] = bench.worker.submit(works("one", range(40, 41)))
    names = ends(futures)
    bench.open.set()
    bench.worker.close()
    assert len(names) == 41
    assert names.index("one") < 8


def test_large_pictures_take_turns_one_label_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label of a large photo takes a second: four in every move would be four seconds for whoever waits beside."""
    monkeypatch.setattr(batching, "NUMBERS", 3 * 30 * 30)
    bench = Bench()
    place = bench.room.take(images=1)
    large = [
        Work(bench.defense.image_state(torch.rand(3, 40, 40)), bench.defense.verdict_flow, False, place, client)
        for client in ("a", "a", "b", "b")
    ]
    futures = bench.worker.submit(large)
    names = ends({"a": futures[:2], "b": futures[2:]})
    bench.worker.close()
    assert set(bench.batches) == {(1, 1)}
    assert set(names[:2]) == {"a", "b"}


def test_no_more_images_are_worked_on_together_than_allowed() -> None:
    bench = Bench(together=3)
    futures = bench.worker.submit([bench.work(seed) for seed in range(10)])
    assert [future.result(20) for future in futures] == bench.offline(range(10))
    assert max(images for images, _ in bench.batches) <= 3


def test_large_pictures_get_few_labels_at_a_time_and_small_ones_beside_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that what nobody waits for any more is dropped after seconds, not when all its labels are there."""
    monkeypatch.setattr(batching, "NUMBERS", 2 * 10 * 3 * 8 * 8)
    bench = Bench()
    small = bench.work(0)
    large = Work(bench.defense.image_state(torch.rand(3, 40, 40)), bench.defense.verdict_flow, False, small.place)
    bench.open.clear()
    first = bench.worker.submit([large])
    assert bench.entered.wait(20)
    second = bench.worker.submit([small])
    bench.open.set()
    assert second[0].result(20) == bench.offline(range(1))[0]
    first[0].result(20)
    bench.worker.close()
    assert bench.batches[0] == (1, 1)
    assert bench.batches[1] == (2, 1 + 9)


def test_an_image_that_cannot_be_classified_fails_alone() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        if (x > 0.999).all(dim=1).any():
            raise ValueError("a white pixel")
        return colours(x)

    bench = Bench(breaks)
    works = [bench.work(0), bench.work(1, broken=True), bench.work(2)]
    futures = bench.worker.submit(works)
    assert futures[0].result(20) == bench.offline(range(1))[0]
    with pytest.raises(OutputError, match="a white pixel"):
        futures[1].result(20)
    assert futures[2].result(20).label == bench.offline(range(3))[2].label
    bench.worker.close()
    assert bench.room.used("images") == 0


def test_cancelled_work_is_dropped_and_gives_its_room_back() -> None:
    bench = Bench()
    bench.open.clear()
    (running,) = bench.worker.submit([bench.work(0)])
    assert bench.entered.wait(20)
    waiting = bench.worker.submit([bench.work(seed) for seed in range(1, 5)])
    for future in waiting:
        assert future.cancel()
    bench.open.set()
    running.result(20)
    bench.worker.close()
    assert bench.room.used("images") == 0
    assert all(images == 1 for images, _ in bench.batches), "nothing was computed for cancelled work"


def test_closing_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    bench = Bench()
    bench.open.clear()
    futures: list[Future[Any]] = bench.worker.submit([bench.work(seed) for seed in range(6)])
    closing = threading.Thread(target=bench.worker.close)
    closing.start()
    while bench.worker.alive:
        pass
    with pytest.raises(ClosedError):
        bench.worker.submit([bench.work(7)])
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
    futures = bench.worker.submit([bench.work(seed) for seed in range(5)])
    assert [future.result(20) for future in futures] == bench.offline(range(5))
    assert len(calls) > 3


def test_room_is_left_once() -> None:
    room = Room(images=1)
    place: Place = room.take(images=1)
    place.leave()
    place.leave()
    assert room.used("images") == 0
