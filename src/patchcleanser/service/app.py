"""The HTTP app: its routes, the page's files, and what the OpenAPI document says beyond the types."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException

import patchcleanser
from patchcleanser.service import answers, schemas
from patchcleanser.service.api_page import api_page
from patchcleanser.service.config import ServiceSettings
from patchcleanser.service.middleware import REQUEST_ID, RequestMiddleware, problem_answer
from patchcleanser.service.problems import PROBLEMS, RefusedError
from patchcleanser.service.service import Service

DESCRIPTION = """Defended answers of an image classifier, whatever an attacker printed on a small part of the picture.

`/v1/predict` answers for any image and promises nothing about that one: it may already carry a patch. `/v1/certify`
proves, for a clean image with its true label, that no patch of the threat changes the answer. Errors are JSON with a
code that keeps its meaning within /v1."""

MEDIA_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "png": "image/png",
    "svg": "image/svg+xml",
}
"""Of the page's files, by the end of their names."""

FRAMEWORK_ERRORS = {
    404: ("not-found", "there is nothing at this address"),
    405: ("method-not-allowed", "this method is not taken here"),
}
"""Codes and messages for errors that the web framework raises itself, by status."""

Responses = dict[int | str, dict[str, Any]]


def create_app(settings: ServiceSettings | None = None) -> FastAPI:
    """The service as an ASGI app, by default with the packaged classifier.

    The model is loaded and tried here, so that wrong settings are an error here. Any ASGI server can
    run it; shutting down finishes what was accepted.
    """
    service = Service(settings or ServiceSettings())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.decoders.start()
        yield
        await service.stop()

    app = FastAPI(
        title="patchcleanser",
        version=patchcleanser.__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # both would load their scripts from elsewhere; ours is a plain page
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(RequestMiddleware, settings=service.settings, metrics=service.metrics)
    _handle_errors(app, service)
    _add_images(app, service)
    _add_facts(app, service)
    _add_operations(app, service)
    _add_page(app)
    _document_key(app)
    return app


def _handle_errors(app: FastAPI, service: Service) -> None:
    """Turn the framework's own errors into ours; RequestMiddleware answers with RefusedErrors."""

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        unknown = ("bad-request" if error.status_code < 500 else "internal", "the request is not understood")
        response = problem_answer(RefusedError(*FRAMEWORK_ERRORS.get(error.status_code, unknown)), service.metrics)
        response.headers.update({k: v for k, v in (error.headers or {}).items() if k.lower() == "allow"})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        raise RefusedError("invalid", f"{str(first['loc'][-1])[:40]}: {first['msg']}")


def _problems(*statuses: int) -> Responses:
    """The errors that a route may answer with, for its documentation."""
    responses: Responses = {}
    for status in statuses:
        texts = [f"`{code}`: {text}" for code, (number, text) in PROBLEMS.items() if number == status]
        responses[status] = {"model": schemas.ErrorAnswer, "description": " ".join(texts)}
    return responses


IMAGE_PROBLEMS = _problems(400, 401, 403, 408, 413, 414, 415, 421, 422, 429, 431, 500, 503, 504)


def _body(json: type[schemas.Options], options: type[schemas.Options]) -> dict[str, Any]:
    """The documentation of a request's body: files with form fields, or JSON with base64."""
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
    content = {
        "application/json": {"example": body.pop("examples")[0], "schema": body},
        "multipart/form-data": {"schema": form, "encoding": {"image": {"contentType": "image/png, image/jpeg"}}},
    }
    return {"requestBody": {"required": True, "content": content}}


PREDICT_BODY = _body(schemas.PredictBody, schemas.PredictOptions)
CERTIFY_BODY = _body(schemas.CertifyBody, schemas.CertifyOptions)


def _add_images(app: FastAPI, service: Service) -> None:
    settings, metrics, names = service.settings, service.metrics, service.model.classifier.names

    @app.post("/v1/predict", tags=["images"], responses=IMAGE_PROBLEMS, openapi_extra=PREDICT_BODY)
    async def predict(request: Request) -> schemas.PredictAnswer:
        """The defended label of each image. What is sent may carry a patch, so nothing is certified here."""
        began = time.monotonic()
        results, options = await service.answer(request, schemas.PredictOptions)
        predictions = [
            answers.prediction(verdict, image, names, defense=settings.defense, details=options.details)
            for verdict, image in results
        ]
        for answer in predictions:
            metrics.verdicts.labels(_case(answer)).inc()
        return schemas.PredictAnswer(
            request_id=REQUEST_ID.get(), predictions=predictions, milliseconds=_milliseconds(began)
        )

    @app.post("/v1/certify", tags=["images"], responses=IMAGE_PROBLEMS, openapi_extra=CERTIFY_BODY)
    async def certify(request: Request) -> schemas.CertifyAnswer:
        """Whether no patch of the threat changes the label. Only for clean images with their true labels."""
        began = time.monotonic()
        results, _ = await service.answer(request, schemas.CertifyOptions)
        certificates = [
            answers.certificate(proof, len(image.table.mask_set), names, max_positions=settings.limits.map_positions)
            for proof, image in results
        ]
        for answer in certificates:
            proved = answer.certified if answer.kind == "recovery" else answer.detection_certified
            metrics.certificates.labels(str(proved).lower()).inc()
        return schemas.CertifyAnswer(
            request_id=REQUEST_ID.get(), certificates=certificates, milliseconds=_milliseconds(began)
        )


def _case(answer: schemas.Recovered | schemas.Detected) -> str:
    if answer.kind == "recovery":
        return answer.case
    return "alert" if answer.alert else "no-alert"


def _milliseconds(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 1)


def _add_facts(app: FastAPI, service: Service) -> None:
    images, names = service.model.samples, service.model.classifier.names

    @app.get("/v1/masks", tags=["facts"], responses=_problems(401, 413, 422, 504))
    async def masks(
        request: Request,
        height: Annotated[int, Query(ge=1, le=1_000_000, examples=[224])],
        width: Annotated[int, Query(ge=1, le=1_000_000, examples=[224])],
        masks: Annotated[int | None, Query(ge=1, le=64, description="Per axis.")] = None,
    ) -> schemas.MasksAnswer:
        """The masks for images of one size on the threat's grid, and what they cost."""
        table = await service.masks(request.state.client, height, width, masks)
        return answers.mask_facts(table, service.settings.threat)

    @app.get("/v1/model", tags=["facts"], responses=_problems(401))
    async def model() -> schemas.ModelAnswer:
        """Which model answers, against which threat, within which limits."""
        return answers.model_facts(service.model)

    @app.get("/v1/samples", tags=["facts"], responses=_problems(401))
    async def samples() -> schemas.SamplesAnswer:
        """The sample images."""
        infos = [
            schemas.SampleInfo(number=number, label=sample.label, name=answers.name_of(sample.label, names))
            for number, sample in enumerate(images)
        ]
        return schemas.SamplesAnswer(samples=infos)

    png: Responses = {200: {"content": {"image/png": {}}, "description": "The picture."}}

    @app.get("/v1/samples/{number}", tags=["facts"], responses=png | _problems(401, 404, 422), response_class=Response)
    async def sample(number: int) -> Response:
        """One sample as a PNG."""
        if not 0 <= number < len(images):
            raise RefusedError("not-found", f"there are {len(images)} samples, counted from 0")
        return Response(images[number].png, media_type="image/png")


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", tags=["operations"])
    async def alive() -> schemas.Health:
        """The process lives."""
        return schemas.Health()

    @app.get("/readyz", tags=["operations"], responses=_problems(503))
    async def ready() -> schemas.Health:
        """The model is warm, its worker lives, and requests are taken."""
        service.check_ready()
        return schemas.Health()

    text: Responses = {200: {"content": {"text/plain": {}}, "description": "Prometheus' format."}}

    @app.get("/metrics", tags=["operations"], responses=text | _problems(401), response_class=Response)
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(generate_latest(service.metrics.registry), media_type=media_type)


def _add_page(app: FastAPI) -> None:
    """Serve the page's files, which are read now: a request never names a file to read."""
    folder = files("patchcleanser.service") / "page"
    contents = {f.name: f.read_bytes() for f in folder.iterdir() if f.name.rpartition(".")[2] in MEDIA_TYPES}

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in contents:
            raise RefusedError(*FRAMEWORK_ERRORS[404])
        media_type = MEDIA_TYPES[name.rpartition(".")[2]]
        return Response(contents[name], media_type=media_type, headers={"cache-control": "no-cache"})

    description = cache(lambda: api_page(app.openapi()))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(description(), media_type="text/html")

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return await part("index.html")


def _document_key(app: FastAPI) -> None:
    """Add the API key that requests may have to carry to the OpenAPI document, which is made when first asked for."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        document.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{}, {"key": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]
