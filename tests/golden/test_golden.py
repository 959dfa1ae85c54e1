"""Nothing that users store or type changes unnoticed: `python tests/golden/recording.py` records it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from golden import recording

HARDWARE_COUNTS = {"rechecked", "flipped", "audited", "caught", "unconfirmed"}
"""Which fast backend a processor has decides these."""


def recorded(name: str) -> Any:
    return json.loads((recording.FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def through_json(content: Any) -> Any:
    return json.loads(json.dumps(content, ensure_ascii=False))


def require_same(current: dict[str, str]) -> None:
    """Skip where a package or the processor is another than when it was recorded."""
    before = recorded("machine")
    changed = [f"{name} {before[name]} → {value}" for name, value in current.items() if before[name] != value]
    if changed:
        pytest.skip(f"recorded elsewhere: {', '.join(changed)}")


def test_fingerprints_of_networks_stay() -> None:
    require_same({name: value for name, value in recording.machine().items() if name in ("torch", "timm")})
    assert recording.fingerprints() == recorded("fingerprints")


def test_the_key_of_a_job_stays() -> None:
    require_same({name: value for name, value in recording.machine().items() if name in ("torch", "timm")})
    assert recording.key() == recorded("key")


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_labels_and_certificates_stay_on_every_machine(precision: str) -> None:
    current, before = through_json(recording.rows(precision)), recorded(f"rows-{precision}")
    assert [set(row) for row in current] == [set(row) for row in before]
    for row, old in zip(current, before, strict=True):
        exact = {name for name, value in old.items() if not _has_floats(value)} - HARDWARE_COUNTS
        assert {name: row[name] for name in exact} == {name: old[name] for name in exact}


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_rows_stay_to_the_last_bit_on_the_same_machine(precision: str) -> None:
    require_same(recording.machine())
    assert through_json(recording.rows(precision)) == recorded(f"rows-{precision}")


def test_the_help_of_every_command_stays() -> None:
    require_same({name: value for name, value in recording.interfaces().items() if name in ("typer", "rich")})
    assert recording.commands() == recorded("commands")


def test_the_http_interface_stays() -> None:
    require_same({name: value for name, value in recording.interfaces().items() if name in ("fastapi", "pydantic")})
    assert through_json(recording.openapi()) == recorded("openapi")


def _has_floats(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, list) and any(isinstance(item, float) for item in value))
