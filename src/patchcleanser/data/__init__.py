"""Names and folders to datasets."""

from patchcleanser.data.base import ArrayDataset, Dataset, EncodedDataset, chosen, in_memory, together
from patchcleanser.data.load import load_dataset

__all__ = ["ArrayDataset", "Dataset", "EncodedDataset", "chosen", "in_memory", "load_dataset", "together"]
