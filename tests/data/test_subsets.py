"""Some images of a dataset: random ones, the authors', or the first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchcleanser.data import EncodedDataset, chosen, load_dataset
from patchcleanser.errors import InputError

WHOLE = EncodedDataset("many", [str(i) for i in range(500)], [b""] * 500, np.arange(500) % 7, list("abcdefg"))


def ids(limit: int | None, **options: object) -> list[int]:
    subset = chosen(WHOLE, limit, **options)  # type: ignore[arg-type]
    assert subset.labels is not None
    numbers = [int(subset.id(i)) for i in range(len(subset))]
    assert subset.labels.tolist() == [i % 7 for i in numbers]
    return numbers


@pytest.mark.parametrize("limit", [1, 50, 499])
def test_the_authors_subset_is_the_one_their_code_takes(limit: int) -> None:
    state = np.random.get_state()
    np.random.seed(233333333)
    theirs = np.arange(500)
    np.random.shuffle(theirs)
    np.random.set_state(state)
    assert set(ids(limit, subset="authors")) == set(theirs[:limit].tolist())


def test_fewer_images_are_part_of_more_with_the_same_seed() -> None:
    assert set(ids(20, seed=3)) < set(ids(100, seed=3))
    assert ids(20, seed=3) == ids(20, seed=3) != ids(20, seed=4)


def test_the_first_images_are_the_first() -> None:
    assert ids(3, subset="first") == [0, 1, 2]


@pytest.mark.parametrize("limit", [None, 500, 501])
def test_no_limit_below_the_size_gives_the_whole(limit: int | None) -> None:
    assert chosen(WHOLE, limit) is WHOLE


@pytest.mark.parametrize(
    ("limit", "subset", "words"),
    [(0, "random", "at least 1 image"), (5, "best", "random, authors or first, got 'best'")],
)
def test_impossible_subsets_are_refused(limit: int, subset: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        chosen(WHOLE, limit, subset=subset)


def test_a_dataset_is_indexed_and_iterated_as_torchs_are() -> None:
    dataset = chosen(load_dataset("sample"), 3)
    pairs = list(dataset)
    assert len(pairs) == 3
    assert [label for _, label in pairs] == dataset.labels.tolist()  # type: ignore[union-attr]
    image, label = dataset[-1]
    assert torch.equal(image, pairs[2][0])
    assert label == pairs[2][1]
    with pytest.raises(InputError, match=r"got slice\(None, 2, None\); for several use patchcleanser.data.chosen"):
        dataset[:2]  # type: ignore[index]
    with pytest.raises(IndexError, match="has 3 images, got index 3"):
        dataset[3]
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)  # type: ignore[arg-type]
    assert [len(labels) for _, labels in loader] == [2, 1]
    assert "3 images, 10 classes" in repr(dataset)
