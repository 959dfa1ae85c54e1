import ast
import subprocess
import sys
from pathlib import Path

import patchcleanser


def test_the_public_names_are_exactly_the_intended_ones() -> None:
    assert dir(patchcleanser) == [
        "CallableClassifier",
        "Case",
        "Certificate",
        "CertifiedAccuracy",
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
        "__version__",
        "evaluate",
        "load_classifier",
        "load_dataset",
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
