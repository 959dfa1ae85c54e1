"""What README and docs show is run, so that it stays true."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from patchcleanser import CallableClassifier, Job, Threat, evaluate, load_dataset
from patchcleanser.cli.app import app
from patchcleanser.data import chosen

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", ["README.md", "docs/own-model.md", "docs/cli.md"])
def test_the_python_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if page == "docs/cli.md":  # it reads a run that its reader has made before
        zero = CallableClassifier(lambda x: x.mean((2, 3)), fingerprint="colours", classes=3)
        data = chosen(load_dataset("parquet:" + str(coloured(tmp_path))), 2)
        evaluate(Job(zero, data, Threat.square(5), masks=2), "runs/a")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:  # one after the other, as a reader would
        exec(compile(block, page, "exec"), names)


def coloured(folder: Path) -> Path:
    import io

    import pyarrow as pa
    from PIL import Image
    from pyarrow import parquet

    file = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(file, format="PNG")
    picture = {"bytes": file.getvalue(), "path": "red.png"}
    parquet.write_table(pa.table({"image": [picture] * 3, "label": [0, 0, 2]}), folder / "red.parquet")
    return folder / "red.parquet"


def command_lines() -> list[tuple[str, str]]:
    """Every indented `patchcleanser …` line of the pages, with the lines it goes on in."""
    pattern = re.compile(r"^(?:    |\$ )(patchcleanser .*)$", flags=re.MULTILINE)
    pages = ((page.name, page.read_text(encoding="utf-8").replace("\\\n", " ")) for page in PAGES)
    return [(name, line) for name, text in pages for line in pattern.findall(text)]


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_the_commands_on_the_pages_exist_with_these_options(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(app)
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    context = command.make_context(words[0], words[1:])  # parses, and runs nothing
    assert context.info_name == words[0]
    assert not context.args


def test_links_to_files_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
