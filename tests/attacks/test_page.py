"""What docs/attacks.md shows is run, so that it stays true."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "attacks.md"


def test_the_snippets_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert (tmp_path / "patch.png").is_file()
