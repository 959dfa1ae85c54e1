"""What README and docs show is run, so that it stays true."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from PIL import Image
from torchvision.models import resnet18
from torchvision.utils import save_image

from patchcleanser import load_classifier, load_dataset
from patchcleanser.cli.app import app
from patchcleanser.defenses import DEFENSES
from patchcleanser.reports.leaderboard import read_claims

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


def test_the_function_of_the_guide_loads_a_weight_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (code,) = (
        block for block in python_blocks(ROOT / "docs" / "guide" / "your-model.md") if "def make_network" in block
    )
    (tmp_path / "my_models.py").write_text(code, encoding="utf-8")
    torch.save(resnet18(num_classes=10).state_dict(), "best.pt")
    (line,) = (line for page, line in command_lines() if page == "your-model.md" and "my_models.py" in line)
    spec = shlex.split(line)[shlex.split(line).index("--model") + 1]
    classifier = load_classifier(spec, device="cpu")
    assert classifier.preprocessing.mean == (0.49, 0.48, 0.45)
    assert classifier.checked_logits(torch.rand(1, 3, 64, 64)).shape == (1, 10)


def test_nothing_tells_users_to_install_a_package_that_is_not_on_the_index() -> None:
    sources = [*PAGES, *sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "results" / "notes").glob("*.md"))]
    pattern = r"pip install [^\n]*patchcleanser\["
    assert [page.name for page in sources if re.search(pattern, page.read_text(encoding="utf-8"))] == []


def rows_of_results(page: Path) -> list[dict[str, str]]:
    """The rows of a page's tables of accuracies, by their headings, without emphasis."""
    rows = []
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        headings, _, *lines = [[c.strip(" *") for c in line.split("|")[1:-1]] for line in table.splitlines()]
        rows += [dict(zip(headings, line, strict=True)) for line in lines if {"clean", "certified"} <= {*headings}]
    return rows


@pytest.mark.parametrize("page", ["README.md", "docs/results/index.md", "docs/guide/harden.md"])
def test_accuracies_on_the_pages_are_those_of_a_claim_of_the_leaderboard(page: str) -> None:
    claims = [claim.to_dict() for claim in read_claims(ROOT)[0].values()]
    rows = rows_of_results(ROOT / page)
    assert rows
    for row in rows:
        shares = {name: row[name] for name in ("undefended", "clean", "certified") if name in row}
        same = [c for c in claims if all(f"{c.get(name, -1):.1f}" == text for name, text in shares.items())]
        assert same, row
        if row.get("images"):
            assert any(f"{claim.get('images', 50_000):,}" == row["images"] for claim in same), row


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


def test_the_pictures_of_the_first_page_are_as_light_or_dark_as_the_page() -> None:
    shown = re.findall(
        r"\((pictures/\S+)#only-(light|dark)\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    )
    assert {scheme for _, scheme in shown} == {"light", "dark"}
    for path, scheme in shown:
        with Image.open(ROOT / "docs" / path) as picture:
            corner = picture.convert("L").getpixel((4, 4))
        assert (corner < 60) == (scheme == "dark"), path


def test_the_glossary_has_every_defense_and_concepts_leads_to_it() -> None:
    glossary = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    assert [name for name in DEFENSES if f"`{name}`" not in glossary] == []
    assert "(../reference/glossary.md)" in (ROOT / "docs" / "guide" / "concepts.md").read_text(encoding="utf-8")


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
