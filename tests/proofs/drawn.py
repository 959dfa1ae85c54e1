"""Random mask sets, threats and label tables, and what Coq computes for many of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from patchcleanser import MaskSet, Threat
from patchcleanser.core.algorithms import LabelFlow, R
from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.label_table import LabelTable
from proofs.coq import compute

MASK_SETS, TABLES = 600, 4


def window(w: Window) -> str:
    return f"Window {w.top} {w.left} {w.height} {w.width}"


def windows(mask: Sequence[Window]) -> str:
    return f"[{'; '.join(map(window, mask))}]"


def random_window(rng: random.Random, image: Size) -> Window:
    height, width = (rng.randint(1, side) for side in image)
    return Window(rng.randint(0, image[0] - height), rng.randint(0, image[1] - width), height, width)


def random_threat(rng: random.Random, image: Size) -> Threat:
    region = random_window(rng, image) if rng.random() < 0.3 else None
    room = region or Window(0, 0, *image)
    count = rng.choice([1, 1, 1, 2])
    if rng.random() < 0.3:
        return Threat.any_rectangle(rng.randint(1, 4), count=count, region=region)
    side = [rng.randint(1, min(2, side)) for side in (room.height, room.width)]
    return Threat.rectangle(*side, count=count, region=region)


def random_masks(rng: random.Random, threat: Threat, image: Size) -> MaskSet:
    """A set as the program builds it, sometimes with a mask left out or shortened, or any windows."""
    if rng.random() < 0.2:
        number = rng.randint(1, 5)
        masks = [tuple(random_window(rng, image) for _ in range(rng.randint(1, 3))) for _ in range(number)]
        return MaskSet(image, tuple(masks))
    built = list(MaskSet.build(threat, image=image, masks=rng.choice([1, 2, 3, 4, 4])).masks)
    if rng.random() < 0.3 and len(built) > 1:
        built.remove(rng.choice(built))
    if rng.random() < 0.3:
        mask = rng.choice(built)
        shorter = tuple(Window(w.top, w.left, w.height, max(1, w.width - 1)) for w in mask)
        built[built.index(mask)] = shorter
    return MaskSet(image, tuple(built))


def random_table(rng: random.Random, masks: MaskSet) -> LabelTable:
    """Mostly the true label 1; the more wrong labels, the less often."""
    wrong = rng.choice([0, 0.02, 0.1, 0.5])
    table = LabelTable(masks)
    table.labels[:] = [rng.choice([0, 1, 2, 3]) if rng.random() < wrong else 1 for _ in table.labels]
    if rng.random() < 0.5:  # an attack: all labels are free but those in the row of one mask
        row = masks.unions.index[rng.randrange(len(masks))]
        free = [rng.choice([0, 2]) for _ in table.labels]
        table.labels[:] = [y if u in row else free[u] for u, y in enumerate(table.labels)]
    table.margins[:] = [rng.choice([0, 0.125] if rng.random() < 0.02 else [0.25, 0.5, 1]) for _ in table.labels]
    table.rounding = rng.choice([0, 0, 0.125, 0.25])  # a label of a smaller margin is uncertain
    table.confidences[:] = [rng.randint(2, 8) / 8 for _ in table.labels]
    return table


def run(flow: Callable[[LabelTable], LabelFlow[R]], full: LabelTable) -> R:
    """What a flow answers that starts with an empty table, and is told the labels that it asks for and no others."""
    table = LabelTable(full.mask_set, LabelTable(full.coarse.mask_set) if full.coarse else None)
    table.rounding = full.rounding
    going = flow(table)
    while True:
        try:
            wanted, unions = next(going)
        except StopIteration as end:
            answer: R = end.value
            return answer
        answers = full if wanted is table else full.coarse
        for name in ("labels", "margins", "confidences"):
            getattr(wanted, name)[unions] = getattr(answers, name)[unions]


@cache
def settings() -> list[tuple[MaskSet, Threat, list[LabelTable]]]:
    rng, drawn = random.Random(0), []
    while len(drawn) < MASK_SETS:
        image = (rng.randint(2, 7), rng.randint(2, 7))
        threat = random_threat(rng, image)
        masks = random_masks(rng, threat, image)
        if rng.random() < 0.05 if len(masks) == 1 else len(masks) <= 16:  # so many take more than one step
            drawn.append((masks, threat, [random_table(rng, masks) for _ in range(TABLES)]))
    return drawn


def rows_of(table: LabelTable) -> list[list[int]]:
    return [table.row_labels(i) for i in range(len(table.mask_set))]


def answers(folder: Path, modules: str, function: str, inputs: Sequence[str]) -> list[Any]:
    """What Coq computes for each input, many in one command."""
    parts = [inputs[start : start + 100] for start in range(0, len(inputs), 100)]
    lists = compute(folder, modules, [f"map ({function}) [{'; '.join(part)}]" for part in parts])
    return [value for values in lists for value in values]
