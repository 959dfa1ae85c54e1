import subprocess
import sys

import patchcleanser


def test_the_public_names_are_exactly_the_intended_ones() -> None:
    assert patchcleanser.__all__ == [
        "CallableClassifier",
        "Case",
        "Certificate",
        "ChallengerMasking",
        "Classifier",
        "Client",
        "DoubleMasking",
        "Job",
        "MaskSet",
        "MinorityReports",
        "PatchCleanserError",
        "Preprocessing",
        "Run",
        "Threat",
        "TorchClassifier",
        "Verdict",
        "Window",
        "evaluate",
        "load_classifier",
        "load_dataset",
    ]
    for name in patchcleanser.__all__:
        assert getattr(patchcleanser, name).__name__ == name


def test_masks_and_threats_work_without_importing_torch() -> None:
    code = (
        "import sys, patchcleanser as p;"
        "assert p.MaskSet.build(p.Threat.square(5), image=(32, 32)).covers(p.Threat.square(5));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
