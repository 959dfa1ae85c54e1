import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import patchcleanser
from patchcleanser import CallableClassifier
from patchcleanser.classifiers.classifier import multi_label_reason
from patchcleanser.errors import ClassifierError


def test_the_public_names_are_exactly_the_intended_ones() -> None:
    assert dir(patchcleanser) == [
        "AttackJob",
        "CallableClassifier",
        "Case",
        "Certificate",
        "CertifiedAccuracy",
        "ChallengerMasking",
        "Classifier",
        "Client",
        "DetectJob",
        "Detections",
        "DoubleMasking",
        "Job",
        "MaskSet",
        "MinorityReports",
        "MultiLabelJob",
        "MultiLabelMasking",
        "ObjectSeeker",
        "OnePass",
        "PatchCleanserError",
        "Preprocessing",
        "Run",
        "Threat",
        "TorchClassifier",
        "Verdict",
        "Window",
        "__version__",
        "audit",
        "audited_job",
        "chosen",
        "evaluate",
        "load_classifier",
        "load_dataset",
        "load_detector",
        "load_multilabel",
        "load_objects",
        "match_labels",
        "timm_preprocessing",
    ]
    assert set(patchcleanser.__all__) == {*dir(patchcleanser)} - {"Client", "__version__"}
    for name in [*patchcleanser.__all__, "Client"]:
        assert getattr(patchcleanser, name).__name__ == name


def test_type_checkers_see_the_same_names() -> None:
    source = ast.parse(Path(patchcleanser.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert sorted(alias.asname or "" for node in imports for alias in node.names) == sorted(patchcleanser._MODULES)


def test_all_names_can_be_imported_at_once_without_the_extras() -> None:
    code = (
        "import sys; sys.modules.update(pydantic=None, httpx=None, fastapi=None, ray=None);"
        "from patchcleanser import *; Threat, evaluate, load_classifier"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_masks_and_threats_work_without_importing_torch() -> None:
    code = (
        "import sys, patchcleanser as p;"
        "assert p.MaskSet.build(p.Threat.square(5), image=(32, 32)).covers(p.Threat.square(5));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_name_that_the_guide_imports_from_a_module_of_ours_is_public_too() -> None:
    """Attacks are imported from `patchcleanser.attacks`, and the cluster's runner needs an extra."""
    pages = Path(__file__).parents[1].joinpath("docs", "guide").glob("*.md")
    imports = re.findall(r"^ *from patchcleanser\.(\S+) import (.+)$", "\n".join(map(Path.read_text, pages)), re.M)
    names = {
        name for module, some in imports if module not in ("attacks", "cluster.runner") for name in some.split(", ")
    }
    assert names <= {*dir(patchcleanser)}


def test_the_error_that_names_multi_label_masking_names_what_can_be_imported() -> None:
    defense = CallableClassifier(lambda x: x.mean((2, 3)), array="torch")
    defense.multi_label = multi_label_reason("the network ends in nn.Sigmoid")
    with pytest.raises(ClassifierError, match="use MultiLabelMasking"):
        patchcleanser.DoubleMasking(defense, "2")
    assert patchcleanser.MultiLabelMasking(defense, "2").multi_label
