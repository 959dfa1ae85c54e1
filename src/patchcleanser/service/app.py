"""The HTTP app: routes, and nothing that could be tested without them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import patchcleanser
from patchcleanser.service import answers, schemas
from patchcleanser.service.documents import CERTIFY_BODY, DESCRIPTION, PREDICT_BODY, document, troubles
from patchcleanser.service.gate import Gate, problem_answer
from patchcleanser.service.logs import REQUEST_ID
from patchcleanser.service.metrics import CONTENT_TYPE
from patchcleanser.service.problems import RefusedError, code_for
from patchcleanser.service.service import Service
from patchcleanser.service.settings import ServiceSettings

PAGE = {
    "index.html": "text/html",
    "page.css": "text/css",
    "api.js": "text/javascript",
    "page.js": "text/javascript",
    "proofs.js": "text/javascript",
    "scene.js": "text/javascript",
    "view.js": "text/javascript",
    "patch.png": "image/png",
    "icon.svg": "image/svg+xml",
}
"""The files of the page; nothing else is ever read for a request."""


def create_app(settings: ServiceSettings | None = None) -> FastAPI:
    """The service as an ASGI app, on the packaged classifier if nothing is said.

    The model is loaded and tried here, so that what is wrong with the settings is an error here. Any ASGI
    server can run it; shutting down finishes what was accepted.
    """
    service = Service(settings or ServiceSettings())

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="patchcleanser",
        version=patchcleanser.__version__,
        description=DESCRIPTION,
        lifespan=life,
        docs_url=None,  # both would load their scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(Gate, settings=service.settings, metrics=service.metrics)
    _handle_errors(app, service)
    _add_images(app, service)
    _add_facts(app, service)
    _add_operations(app, service)
    _add_page(app)
    document(app)
    return app


def _handle_errors(app: FastAPI, service: Service) -> None:
    def answer(problem: RefusedError) -> Response:
        service.metrics.problems.labels(problem.code).inc()
        return problem_answer(problem)

    @app.exception_handler(RefusedError)
    async def ours(request: Request, error: RefusedError) -> Response:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        code = code_for(error.status_code)
        words = {"not-found": "there is nothing at this address", "method-not-allowed": "this method is not taken here"}
        response = answer(RefusedError(code, words.get(code, "the request is not understood")))
        response.headers.update({k: v for k, v in (error.headers or {}).items() if k.lower() == "allow"})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return answer(RefusedError("invalid", f"{str(first['loc'][-1])[:40]}: {first['msg']}"))


def _add_images(app: FastAPI, service: Service) -> None:
    names = service.engine.classifier.names

    @app.post("/v1/predict", tags=["images"], responses=troubles(*IMAGE_TROUBLES), openapi_extra=PREDICT_BODY)
    async def predict(request: Request) -> schemas.PredictAnswer:
        """The defended label of each image. What is sent may carry a patch, so nothing is certified here."""
        began = time.monotonic()
        played, options = await service.predict(request)
        defense, details = service.settings.defense, options.details
        found = [answers.prediction(v, s, names, defense=defense, details=details) for v, s in played]
        for one in found:
            service.metrics.verdicts.labels(_case(one)).inc()
        return schemas.PredictAnswer(request_id=_id(), predictions=found, milliseconds=_since(began))

    @app.post("/v1/certify", tags=["images"], responses=troubles(*IMAGE_TROUBLES), openapi_extra=CERTIFY_BODY)
    async def certify(request: Request) -> schemas.CertifyAnswer:
        """Whether no patch of the threat changes the label. Only for clean images with their true labels."""
        began = time.monotonic()
        played, _ = await service.certify(request)
        threat, most = service.settings.threat, service.settings.limits.map_positions
        found = [answers.certificate(c, s.table.mask_set, threat, names, most=most) for c, s in played]
        for one in found:
            proved = one.certified if isinstance(one, schemas.RecoveryCertificate) else one.detection_certified
            service.metrics.certificates.labels(str(proved).lower()).inc()
        return schemas.CertifyAnswer(request_id=_id(), certificates=found, milliseconds=_since(began))


IMAGE_TROUBLES = (400, 401, 403, 408, 413, 414, 415, 421, 422, 429, 431, 500, 503, 504)


def _add_facts(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.get("/v1/masks", tags=["facts"], responses=troubles(401, 413, 422, 504))
    async def masks(
        request: Request,
        height: Annotated[int, Query(ge=1, le=1_000_000, examples=[224])],
        width: Annotated[int, Query(ge=1, le=1_000_000, examples=[224])],
        masks: Annotated[int | None, Query(ge=1, le=64, description="Per axis.")] = None,
    ) -> schemas.MasksAnswer:
        """The masks for images of one size on the threat's grid, and what they cost."""
        mask_set = await service.masks(request.state.client, height, width, masks)
        return answers.mask_facts(mask_set, service.settings.threat)

    @app.get("/v1/model", tags=["facts"], responses=troubles(401))
    async def model() -> schemas.ModelAnswer:
        """Which model answers, against which threat, within which limits."""
        return answers.model_facts(engine)

    @app.get("/v1/samples", tags=["facts"], responses=troubles(401))
    async def samples() -> schemas.SamplesAnswer:
        """The sample images."""
        names = engine.classifier.names
        found = [
            schemas.SampleInfo(
                number=n, label=s.label, name=None if s.label is None else answers.name_of(s.label, names)
            )
            for n, s in enumerate(engine.samples)
        ]
        return schemas.SamplesAnswer(samples=found)

    png: dict[int | str, dict[str, Any]] = {200: {"content": {"image/png": {}}, "description": "The picture."}}

    @app.get("/v1/samples/{number}", tags=["facts"], responses=png | troubles(401, 404, 422), response_class=Response)
    async def sample(number: int) -> Response:
        """One sample as a PNG."""
        if not 0 <= number < len(engine.samples):
            raise RefusedError("not-found", f"there are {len(engine.samples)} samples, counted from 0")
        return Response(engine.samples[number].content, media_type="image/png")


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", tags=["operations"])
    async def alive() -> schemas.Health:
        """The process lives."""
        return schemas.Health()

    @app.get("/readyz", tags=["operations"], responses=troubles(503))
    async def ready() -> schemas.Health:
        """The model is warm, its worker lives, and requests are taken."""
        if not service.ready:
            raise RefusedError("not-ready", "the service is shutting down", retry_after=1)
        return schemas.Health()

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}, "description": "Prometheus' format."}}

    @app.get("/metrics", tags=["operations"], responses=text | troubles(401), response_class=Response)
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)


def _add_page(app: FastAPI) -> None:
    folder = files("patchcleanser.service") / "page"
    contents = {name: (folder / name).read_bytes() for name in PAGE}

    def served(name: str) -> Response:
        return Response(contents[name], media_type=PAGE[name], headers={"cache-control": "no-cache"})

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return served("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in contents:
            raise RefusedError("not-found", "there is nothing at this address")
        return served(name)


def _case(found: schemas.Recovered | schemas.Detected) -> str:
    if isinstance(found, schemas.Recovered):
        return found.case
    return "alert" if found.alert else "no-alert"


def _id() -> str:
    return REQUEST_ID.get() or ""


def _since(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 1)
