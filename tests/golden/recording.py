"""What must not change while code moves: fingerprints, keys, rows, commands and the HTTP interface.

    python tests/golden/recording.py      # record anew, after a change that is meant

Numbers depend on the processor and on package versions. So these are recorded, too, and what depends on them is
compared only where they are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from patchcleanser import Job, Threat, TorchClassifier, evaluate, load_classifier, load_dataset
from patchcleanser.cli.app import COMMANDS, app
from patchcleanser.data import chosen
from patchcleanser.service.app import create_app
from patchcleanser.service.config import ServiceSettings

FOLDER = Path(__file__).parent
ZOO = ["zoo:tiny", "zoo:cifar10-mlp", "zoo:cifar10-resnet", "zoo:cifar10-vit"]
AROUND = ["inpaint:zoo:tiny", "mirror:zoo:tiny"]
BASELINES = {
    "bagnet": "net:bagnet?field=5",
    "bagnet17": "net:bagnet17",
    "interval": "net:interval",
    "ablated": "net:ablated",
    "smoothed-vit": "net:smoothed-vit",
}
IMAGES = 12
TIMES = {"seconds"}
PACKAGES = ("torch", "timm", "numpy")
INTERFACES = ("typer", "rich", "fastapi", "pydantic")


def machine() -> dict[str, str]:
    """What rounding depends on."""
    facts = {name: version(name) for name in PACKAGES}
    return {**facts, "cpu": torch.backends.cpu.get_cpu_capability(), "processor": _processor()}


def _processor() -> str:
    """A hash of all that Linux says of the first core but its speed: kernels are chosen by it."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
        lines = [line for line in first.splitlines() if not line.startswith(("cpu MHz", "bogomips"))]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return platform.processor()


def interfaces() -> dict[str, str]:
    """What the shape of documents depends on."""
    return {name: version(name) for name in INTERFACES}


def fingerprints() -> dict[str, str]:
    """Of stored networks, and of baselines' networks with weights drawn by a seed."""
    found = {spec: load_classifier(spec, device="cpu").fingerprint for spec in [*ZOO, *AROUND]}
    for name, spec in BASELINES.items():
        torch.manual_seed(0)
        classifier = load_classifier(spec, device="cpu")
        assert isinstance(classifier, TorchClassifier)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in classifier.module.parameters():
                parameter.copy_(torch.randint(-8, 8, parameter.shape, generator=generator) / 64)
        found[name] = classifier.fingerprint
    return found


def job(precision: str = "exact") -> Job:
    """Twelve sample images."""
    classifier = load_classifier("zoo:tiny", device="cpu")
    data = chosen(load_dataset("sample"), IMAGES)
    return Job(classifier, data, Threat.square(5), masks=4, precision=precision, table=True)  # type: ignore[arg-type]


def key() -> str:
    """The key that a stored run of this job has."""
    with tempfile.TemporaryDirectory() as folder:
        return evaluate(job(), Path(folder) / "run").key


def rows(precision: str) -> list[dict[str, Any]]:
    """Rows without their times, on one thread, with known entropy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = evaluate(job(precision), Path(folder) / "run", metadata={"entropy": 0})
            table = run.read()
    finally:
        torch.set_num_threads(threads)
    return [{name: value for name, value in row.items() if name not in TIMES} for row in table.to_pylist()]


def commands() -> dict[str, str]:
    """The words of each command's --help."""
    runner, wide = CliRunner(), {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    pages = {name: runner.invoke(app, [name, "--help"], env=wide).output for name in COMMANDS}
    return {name: " ".join(re.findall(r"[^\s│╭╮╰╯─]+", page)) for name, page in pages.items()}


def openapi() -> dict[str, Any]:
    """The document of the HTTP service."""
    document: dict[str, Any] = create_app(ServiceSettings(model="zoo:tiny", device="cpu")).openapi()
    return document


def write(name: str, content: Any) -> None:
    """As JSON; of a list one entry a line."""
    if isinstance(content, list):
        lines = ",\n".join(json.dumps(entry, ensure_ascii=False, sort_keys=True) for entry in content)
        text = f"[\n{lines}\n]"
    else:
        text = json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    write("machine", {**machine(), **interfaces()})
    write("fingerprints", fingerprints())
    write("key", key())
    for precision in ("exact", "fast"):
        write(f"rows-{precision}", rows(precision))
    write("commands", commands())
    write("openapi", openapi())


if __name__ == "__main__":
    main()
