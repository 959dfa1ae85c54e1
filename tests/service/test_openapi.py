"""The OpenAPI document against the server that it describes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from patchcleanser.service.app import create_app
from patchcleanser.service.problems import PROBLEMS

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


def run_schemathesis(server: Any, examples: int, folder: Path) -> str:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.address}/openapi.json", "--seed", "1"),
        *("--checks", ",".join(CHECKS), "--max-examples", str(examples), "--no-color"),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_generated_requests_get_the_answers_that_are_documented(tiny_server: Any, tmp_path: Path) -> None:
    output = run_schemathesis(tiny_server, 5, tmp_path)
    assert re.search(r"Tested: 9\b", output), output
    statuses = {(line["route"], line["status"]) for line in tiny_server.lines() if "route" in line}
    assert {("/v1/predict", 200), ("/v1/certify", 200)} <= statuses, "the examples of the document must work"


@pytest.mark.slow
def test_many_generated_requests_get_the_answers_that_are_documented(tiny_server: Any, tmp_path: Path) -> None:
    assert re.search(r"Tested: 9\b", run_schemathesis(tiny_server, 500, tmp_path))


def test_the_document_names_every_error_a_route_gives(tiny_server: Any) -> None:
    document = httpx.get(f"{tiny_server.address}/openapi.json").json()
    responses = document["paths"]["/v1/predict"]["post"]["responses"]
    for code, (status, _) in PROBLEMS.items():
        if code not in ("not-found", "method-not-allowed"):
            assert code in responses[str(status)]["description"], code
    assert set(document["paths"]["/v1/predict"]["post"]["requestBody"]["content"]) == {
        "application/json",
        "multipart/form-data",
    }


def test_the_page_of_the_api_shows_every_operation_and_type_and_its_examples_work(client: TestClient) -> None:
    response = client.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "<script" not in response.text
    document = client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        assert all(f">{method.upper()} {path}</code></h2>" in response.text for method in methods)
    anchors = set(re.findall(r'id="([^"]+)"', response.text))
    assert set(document["components"]["schemas"]) <= anchors
    assert set(re.findall(r'href="#([^"]+)"', response.text)) <= anchors
    examples = [address.replace("&amp;", "&") for address in re.findall(r'class="try" href="([^"]+)"', response.text)]
    assert "v1/masks?height=224&width=224" in examples
    for address in examples:
        assert client.get(f"/{address}").status_code == (404 if "samples/" in address else 200)  # it has no samples
    assert "curl -F image=@photo.png -F labels=0 http://127.0.0.1:8000/v1/certify" in response.text


def test_the_page_of_the_api_needs_no_key(kit: Any) -> None:
    with TestClient(create_app(kit.toy(api_key="a key of many letters"))) as asking:
        assert asking.get("/docs").status_code == 200
        assert asking.get("/openapi.json").status_code == 401


def test_every_error_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    for code, (status, _) in PROBLEMS.items():
        assert f"| `{code}` | {status} |" in page
