"""The images of all experiments, by name: what the paper used, what is at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from patchcleanser.data import Dataset, load_dataset
from patchcleanser.data.catalog import NAMED


@dataclass(frozen=True)
class Images:
    """A dataset of the paper: the split that is tested, and how many images it has in full."""

    name: str
    split: str
    whole: int

    @property
    def title(self) -> str:
        """What it is called."""
        return NAMED[self.name].title

    def load(self, root: Path | None = None) -> Dataset:
        """From root/NAME, or root itself; else from the cache, downloaded where that is possible."""
        return load_dataset(self.name, split=self.split, root=self.folder(root))

    def folder(self, root: Path | None) -> Path | None:
        """The folder that holds it: root/NAME or root; None if it is in neither."""
        places = (root / self.name, root) if root is not None else ()
        return next((place for place in places if NAMED[self.name].find(place, self.split)), None)


DATA: dict[str, Images] = {
    images.name: images
    for images in (
        Images("imagenette", "val", 3925),
        Images("imagenet", "val", 50_000),
        Images("cifar10", "test", 10_000),
        Images("flowers102", "test", 6149),
        Images("cifar100", "test", 10_000),
        Images("svhn", "test", 26_032),
        Images("tiny-imagenet", "val", 10_000),
    )
}
