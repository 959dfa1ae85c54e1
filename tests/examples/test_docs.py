"""What README and docs show is run, so that it stays true."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from torchvision.utils import save_image

from patchcleanser import load_dataset
from patchcleanser.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
ELSEWHERE = ("CONTRIBUTING.md", "serve.md")  # run by tests/test_contributing.py and tests/service/test_server.py
LONGEST_SENTENCE = 35
WORDS_OF_A_GUIDE_PAGE = 900


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in ELSEWHERE and python_blocks(page)],
    ids=lambda page: page.name,
)
def test_the_python_blocks_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in python_blocks(page):
        exec(compile(block, page.name, "exec"), names)


def options_file() -> str:
    """The TOML blocks of the pages, which the commands there name as options.toml."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return "".join(re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL))


def command_lines() -> list[tuple[str, str]]:
    """Every indented `patchcleanser …` line of the pages, with the lines it goes on in."""
    pattern = re.compile(r"^(?:    |\$ )(patchcleanser .*)$", flags=re.MULTILINE)
    pages = ((page.name, page.read_text(encoding="utf-8").replace("\\\n", " ")) for page in PAGES)
    return [(name, line) for name, text in pages for line in pattern.findall(text)]


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_the_commands_on_the_pages_exist_with_these_options(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.toml").write_text(options_file(), encoding="utf-8")
    words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(app)
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    context = command.make_context(words[0], words[1:])  # parses, and runs nothing
    assert context.info_name == words[0]
    assert not context.args


ENDLESS = ("serve", "demo")  # tests/service starts the service; `make demo` and `make wheel` run the demo
RUN_PAGES = [
    ROOT / "docs" / "guide" / "quickstart.md",
    pytest.param(ROOT / "README.md", marks=pytest.mark.slow),
    pytest.param(ROOT / "docs" / "guide" / "certify.md", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_work_as_written(page: Path, tmp_path: Path) -> None:
    (tmp_path / "options.toml").write_text(options_file(), encoding="utf-8")
    save_image(load_dataset("sample").image(0), tmp_path / "photo.jpg")
    lines = [shlex.split(line, comments=True) for name, line in command_lines() if name == page.name]
    assert lines
    for _, *words in lines:
        if words[0] not in ENDLESS:
            command = [sys.executable, "-m", "patchcleanser", *words]
            outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert outcome.returncode == 0, f"{words}: {outcome.stderr}"


def test_links_to_files_lead_somewhere() -> None:
    generated = ROOT / "docs" / "reference" / "commands.md"
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            assert path == generated or path.exists(), f"{page.name}: {target}"


def sentences(page: Path) -> list[str]:
    """The prose of a page: no code, tables, headings or HTML; an item of a list is a sentence of its own."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"^(?:    |\||#|:::|!\[|<).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    return re.split(r"(?<=[.!?])\s+|\n\n", text)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "paper.md"], ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    assert [s for s in sentences(page) if len(s.split()) > LONGEST_SENTENCE] == []


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/guide/*.md")), ids=lambda page: page.name)
def test_guide_pages_are_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= WORDS_OF_A_GUIDE_PAGE
