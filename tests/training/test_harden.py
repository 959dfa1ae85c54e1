"""Label-free hardening of a real, finished classifier."""

from __future__ import annotations

import copy

import pytest
import torch

from patchcleanser import Threat, TorchClassifier
from patchcleanser.classifiers.networks import resnet
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.data import in_memory, load_dataset, together
from patchcleanser.errors import InputError
from patchcleanser.training import Recipe, fit
from patchcleanser.training.harden import Check, HardenSettings, harden

THREAT = Threat.square(5)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> TorchClassifier:
    """A finished classifier that never saw a mask: trained on the sample, and not well."""
    torch.manual_seed(0)
    recipe = Recipe(20, 50, "sgd", 0.1, schedule="onecycle", warmup=0.2, shift=2, holdout=0.0, precision="no")
    images = in_memory(load_dataset("sample"), (32, 32))
    preprocessing = Preprocessing((32, 32), mean=(0.49, 0.48, 0.45), std=(0.25, 0.25, 0.26))
    network = resnet(layers=(1, 1, 1, 1), channels=(16, 24, 32, 48), stem_stride=2)
    fitted = fit(network, images, recipe, preprocessing=preprocessing, out=tmp_path_factory.mktemp("fit"))
    return TorchClassifier(fitted.module, preprocessing, classes=10)


def test_the_copy_says_of_masked_photos_what_the_original_says_of_whole_ones(classifier: TorchClassifier) -> None:
    before = copy.deepcopy(classifier.module.state_dict())
    photos = together([load_dataset("sample")])  # without labels
    seen: list[Check] = []
    settings = HardenSettings(epochs=5, batch=25, rate=1e-3, tries=1, holdout=0.3, smallest_crop=0.8)
    done = harden(classifier, photos, THREAT, settings=settings, watch=lambda c, n: seen.append(c))
    assert done.checks[0].agreement == 1.0  # the copy starts as the original
    assert done.best.invariance > done.checks[0].invariance
    assert done.best.agreement > 0.7
    assert [c.epoch for c in seen] == [1, 2, 3, 4, 5]
    # The original is untouched, and so are the batch-norm statistics of the copy.
    for name, tensor in classifier.module.state_dict().items():
        assert torch.equal(tensor, before[name])
        if "running" in name:
            assert torch.equal(done.classifier.module.state_dict()[name], tensor)
    assert done.classifier.fingerprint != classifier.fingerprint
    assert not any(m.training for m in done.classifier.module.modules())


def test_it_stops_by_itself_when_nothing_improves(classifier: TorchClassifier) -> None:
    photos = together([load_dataset("sample")], limit=60)
    settings = HardenSettings(epochs=30, batch=16, rate=1e-12, tries=1, patience=2)
    done = harden(classifier, photos, THREAT, settings=settings)
    assert len(done.checks) == 1 + 2
    assert done.best.epoch == 0


def test_too_few_photos_and_open_sizes_are_refused(classifier: TorchClassifier) -> None:
    with pytest.raises(InputError, match="at least 10 photos, got 5"):
        harden(classifier, together([load_dataset("sample")], limit=5), THREAT)
    loose = TorchClassifier(resnet(channels=(8, 8, 8, 8)).eval(), Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3))
    with pytest.raises(InputError, match="needs a fixed input size"):
        harden(loose, together([load_dataset("sample")], limit=20), THREAT)
