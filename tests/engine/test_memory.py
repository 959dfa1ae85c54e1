"""Memory is bounded by the chunk, not by the number of images: ViT-B on a CPU, each case in a process of its own."""

import json
import subprocess
import sys
from functools import cache

import pytest

GIGABYTE = 1_000_000_000
LIMIT = 4 * GIGABYTE

PROGRAM = """
import json, resource, sys
from pathlib import Path
import torch
from patchcleanser import DoubleMasking, Threat, load_classifier

def peak():
    # ru_maxrss survives exec, so it can be the size of the pytest process that started us; VmHWM is our own.
    rusage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    own = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return own[0] if own else rusage

verb, count = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
classifier = load_classifier("timm:vit_base_patch16_224?weights=none", device="cpu")
defense = DoubleMasking(classifier, Threat.square(32), masks=6)
loaded = peak()
# On noise an untrained network disagrees with itself, so second rounds are run and chunks are full. The other images
# are as grey as the masks: one round each, which keeps the test short.
stream = (torch.rand(3, 224, 224) if n == 0 else torch.full((3, 224, 224), 0.5) for n in range(count))
if verb == "predict":
    answers = defense.predict(stream)
else:
    answers = defense.certify(stream, [0] * count)
spent = sum(answer.classifications for answer in answers)
print(json.dumps({"images": len(answers), "classifications": spent, "loaded": loaded, "peak": peak()}))
"""


@cache
def measured(verb: str, count: int) -> dict[str, int]:
    """Run the program once per case; its numbers are shown with `pytest -s`."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, verb, str(count)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout.splitlines()[-1])
    print(f"\n{verb} {count}: {numbers}")
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "count"), [("predict", 1), ("predict", 4), ("certify", 1)])
def test_vit_base_on_a_cpu_stays_below_four_gigabytes(verb: str, count: int) -> None:
    numbers = measured(verb, count)
    assert numbers["images"] == count
    assert numbers["classifications"] >= 36 * count
    assert numbers["loaded"] < numbers["peak"] < LIMIT


@pytest.mark.slow
def test_more_images_hardly_need_more_memory() -> None:
    single, four = measured("predict", 1)["peak"], measured("predict", 4)["peak"]
    assert four <= 1.1 * single + 0.1 * GIGABYTE
