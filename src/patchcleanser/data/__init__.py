"""Names and folders to datasets."""

from patchcleanser.data.base import ArrayDataset, Dataset, EncodedDataset, chosen, in_memory, together
from patchcleanser.data.load import DATASETS, load_dataset
from patchcleanser.data.pictures import decode

__all__ = [
    "DATASETS",
    "ArrayDataset",
    "Dataset",
    "EncodedDataset",
    "chosen",
    "decode",
    "in_memory",
    "load_dataset",
    "together",
]
