"""Names and folders to datasets."""

from patchcleanser.data.catalog import DATASETS, load_dataset
from patchcleanser.data.codec import decode
from patchcleanser.data.dataset import ArrayDataset, Dataset, EncodedDataset, chosen, in_memory, together

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
