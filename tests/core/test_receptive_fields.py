"""What a patch can footprint, against a count of every pixel."""

from __future__ import annotations

import numpy as np
import pytest

from patchcleanser.core.geometry import Window
from patchcleanser.core.receptive_fields import ReceptiveFields
from patchcleanser.core.threats import Threat
from patchcleanser.errors import InputError

FIELDS = {
    "columns": ReceptiveFields.bands((5, 7), 2),
    "rows": ReceptiveFields.bands((5, 7), 3, columns=False),
    "blocks": ReceptiveFields.blocks((5, 6), 2),
    "fields": ReceptiveFields.fields((7, 9), 3, 2),
    "fields that leave a border unseen": ReceptiveFields.fields((8, 8), 3, 4),
}
THREATS = [
    Threat.square(1),
    Threat.rectangle(2, 3),
    Threat.any_rectangle(4),
    Threat.square(2, region=Window(1, 1, 3, 3)),
]


def every_footprint(fields: ReceptiveFields, threat: Threat) -> list[np.ndarray]:  # type: ignore[type-arg]
    """For each placement the scores that see one of its pixels, pixel by pixel."""
    room, footprints = threat.room(fields.size), []
    for height, width in threat.shapes(fields.size):
        for top in range(room.top, room.bottom - height + 1):
            for left in range(room.left, room.right - width + 1):
                reached = np.zeros(fields.grid, dtype=bool)
                for row in range(top, top + height):
                    for column in range(left, left + width):
                        reached |= fields.down[:, row][:, None] & fields.across[:, column][None]
                footprints.append(reached)
    return footprints


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("name", FIELDS)
def test_footprints_hold_every_placement_and_nothing_that_no_placement_reaches(name: str, threat: Threat) -> None:
    fields = FIELDS[name]
    listed = [
        rows[:, None] & columns[None]
        for footprint in fields.footprints(threat)
        for rows in footprint.rows
        for columns in footprint.columns
    ]
    every = every_footprint(fields, threat)
    assert all(any((reached <= other).all() for other in listed) for reached in every)
    assert all(any((other == reached).all() for reached in every) for other in listed)
    assert max(footprint.max_scores for footprint in fields.footprints(threat)) == max(
        int(reached.sum()) for reached in every
    )


@pytest.mark.parametrize(("keep", "patch"), [(4, 2), (4, 5), (25, 3)])
def test_a_patch_reaches_as_many_bands_as_the_paper_says(keep: int, patch: int) -> None:
    (footprint,) = ReceptiveFields.bands((32, 32), keep).footprints(Threat.square(patch))
    assert footprint.max_scores == keep + patch - 1
    (footprint,) = ReceptiveFields.blocks((32, 32), keep).footprints(Threat.square(patch))
    assert footprint.max_scores == (keep + patch - 1) ** 2


def test_the_window_of_a_placement_reaches_what_is_said() -> None:
    fields, threat = ReceptiveFields.fields((7, 9), 3, 2), Threat.rectangle(2, 3)
    (footprint,) = fields.footprints(threat)
    for placement in range(len(footprint.tops) * len(footprint.lefts)):
        window = footprint.window(placement)
        down, across = divmod(placement, len(footprint.lefts))
        assert (fields.down[:, window.top : window.bottom].any(1) == footprint.rows[down]).all()
        assert (fields.across[:, window.left : window.right].any(1) == footprint.columns[across]).all()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="keeps between 1 and 32 px of a side of 32 px, got 40"):
        ReceptiveFields.bands((32, 32), 40)
    with pytest.raises(InputError, match="a receptive field of 17 px does not fit an image of 16×32 px"):
        ReceptiveFields.fields((16, 32), 17, 8)
