"""Names and folders to datasets."""

from patchcleanser.data.base import ArrayDataset, Dataset, EncodedDataset, together
from patchcleanser.data.load import load_dataset

__all__ = ["ArrayDataset", "Dataset", "EncodedDataset", "load_dataset", "together"]
