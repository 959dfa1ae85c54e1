"""What the OpenAPI document says beyond the types: bodies of two kinds, errors by status, keys."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from patchcleanser.service import schemas
from patchcleanser.service.problems import PROBLEMS

DESCRIPTION = """Defended answers of an image classifier, whatever an attacker printed on a small part of the picture.

`/v1/predict` answers for any image and promises nothing about that one: it may already carry a patch. `/v1/certify`
proves, for a clean image with its true label, that no patch of the threat changes the answer. Errors are JSON with a
code that keeps its meaning within /v1."""


def troubles(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors that a route may answer with, for its documentation."""
    said: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        codes = {code: kind.words for code, kind in PROBLEMS.items() if kind.status == status}
        words = " ".join(f"`{code}`: {text}" for code, text in codes.items())
        said[status] = {"model": schemas.ErrorAnswer, "description": words}
    return said


def _body(json: type[schemas.Options], options: type[schemas.Options]) -> dict[str, Any]:
    """Files with form fields, or JSON with base64."""
    form = options.model_json_schema()
    form["properties"] = {
        "image": {
            "type": "array",
            "items": {"type": "string", "format": "binary"},
            "minItems": 1,
            "description": "Encoded pictures (PNG, JPEG, …), as files.",
        },
        **form["properties"],
    }
    form["required"] = ["image", *form.get("required", [])]
    body = json.model_json_schema()
    example = body.pop("examples")[0]
    return {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": body, "example": example},
                "multipart/form-data": {
                    "schema": form,
                    "encoding": {"image": {"contentType": "image/png, image/jpeg"}},
                },
            },
        }
    }


PREDICT_BODY = _body(schemas.PredictBody, schemas.PredictOptions)
CERTIFY_BODY = _body(schemas.CertifyBody, schemas.CertifyOptions)


def document(app: FastAPI) -> None:
    """Add the key that requests may have to carry; made once, when first asked for."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        made = make()
        made.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{}, {"key": []}]
        return made

    app.openapi = openapi  # type: ignore[method-assign]
