"""What surrounds every request: its id, checks, limits on its body, security headers, a log line and metrics."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import datetime, timezone
from functools import partial
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.process_collector import ProcessCollector
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from patchcleanser.service import access
from patchcleanser.service.config import Limits, ServiceSettings
from patchcleanser.service.problems import CLIENT_GONE, ClientGoneError, RefusedError
from patchcleanser.service.schemas import ErrorAnswer, ErrorFacts

log = logging.getLogger("patchcleanser.service")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that this code works for."""
USABLE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
OPEN = re.compile(r"/|/docs|/healthz|/readyz|/page/[a-z.-]+")
"""Addresses that need no key."""
HEADERS = {
    # The page needs its own script, style and pictures, and nothing from anywhere else.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Metrics:
    """Prometheus metrics, in a registry of their own so that several apps can live in one process.

    Labels take few values: routes and not addresses, codes and not messages.
    """

    def __init__(self, queued_images: Callable[[], float]) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        by_status = ["route", "method", "status"]
        self.requests = counter("patchcleanser_requests", "Requests by route and status.", by_status)
        self.seconds = histogram(
            "patchcleanser_request_seconds", "From first byte to answer.", ["route"], buckets=SECONDS
        )
        self.problems = counter("patchcleanser_problems", "Errors by code.", ["code"])
        self.verdicts = counter("patchcleanser_verdicts", "Predictions by case.", ["case"])
        self.certificates = counter("patchcleanser_certificates", "Images sent to be certified.", ["certified"])
        self.batch_labels = histogram("patchcleanser_batch_labels", "Labels computed in one batch.", buckets=SIZES)
        self.batch_images = histogram("patchcleanser_batch_images", "Images in one batch.", buckets=SIZES[:9])
        self.model_seconds = counter("patchcleanser_model_seconds", "Time the model was at work.")
        queue = Gauge("patchcleanser_queue_images", "Images accepted and not answered yet.", registry=registry)
        queue.set_function(queued_images)


class JsonLines(logging.Formatter):
    """Every record as one line of JSON, with the id of the request it belongs to."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def configure_logging(stream: TextIO) -> None:
    """Write the service's and the web server's log records to a stream, as JSON lines."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logging.captureWarnings(True)  # Pillow warns of odd pictures
    for name in ("patchcleanser.service", "uvicorn", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    logging.getLogger("uvicorn.access").disabled = True  # ours say more


def problem_answer(problem: RefusedError, metrics: Metrics) -> JSONResponse:
    """The response for a problem, which is counted."""
    metrics.problems.labels(problem.code).inc()
    facts = ErrorFacts(code=problem.code, message=problem.message, request_id=REQUEST_ID.get(), image=problem.image)
    headers = {} if problem.retry_after is None else {"Retry-After": str(problem.retry_after)}
    if problem.code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(ErrorAnswer(error=facts).model_dump(), status_code=problem.status, headers=headers)


def check_head(target: bytes, headers: Sequence[tuple[bytes, bytes]], limits: Limits) -> None:
    """Refuse a request whose address or header fields are over a limit."""
    if len(target) > limits.url_bytes:
        raise url_too_long(limits, f"{len(target):,}")
    if len(headers) > limits.headers:
        message = f"the request has {len(headers):,} header fields; at most {limits.headers:,} are taken; send fewer"
        raise RefusedError("headers-too-large", message)
    size = len(target) + sum(len(name) + len(value) + 4 for name, value in headers)  # 4: a colon, a space, CRLF
    if size > limits.header_bytes:
        raise headers_too_large(limits, f"{size:,}")


def url_too_long(limits: Limits, size: str) -> RefusedError:
    """The refusal of a request whose address has too many bytes."""
    message = f"the address has {size} bytes; at most {limits.url_bytes:,} are taken; send data in the body"
    return RefusedError("url-too-long", message)


def headers_too_large(limits: Limits, size: str) -> RefusedError:
    """The refusal of a request whose header fields have too many bytes."""
    most = f"at most {limits.header_bytes:,} are taken; send shorter ones"
    return RefusedError("headers-too-large", f"the request line and headers have {size} bytes; {most}")


class RequestState:
    """What is known of one request while it is handled, and where its response is sent."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self.request_id = send, request_id
        self.began = time.monotonic()
        self.status = 0
        """0 until a response starts."""
        self.body_bytes = 0
        self.reservations: list[access.Reservation] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message).update(HEADERS | {"x-request-id": self.request_id})
        await self._send(message)


class RequestMiddleware:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, settings: ServiceSettings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        limits = settings.limits
        self.bodies = access.Capacity(bytes=limits.queue_bytes, shares={"bytes": limits.client_bytes})
        self.proxies = access.Proxies(settings.proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it; log and count it either way."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        state = RequestState(send, client_id if USABLE_ID.fullmatch(client_id) else uuid.uuid4().hex)
        token = REQUEST_ID.set(state.request_id)
        try:
            await self._answer(scope, headers, receive, state)
        finally:
            for reservation in state.reservations:
                reservation.release()
            self._record(scope, state)
            REQUEST_ID.reset(token)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, state: RequestState) -> None:
        try:
            self._check(scope, headers)
            client = access.client_name(scope, headers, self.settings.keys, self.proxies)
            scope.setdefault("state", {})["client"] = client
            await self.app(scope, self._limited(receive, state, client), state.send)
            return
        except (ClientGoneError, ClientDisconnect):
            state.status = CLIENT_GONE
            return
        except RefusedError as refused:
            problem = refused
        except Exception:
            log.exception("a request failed")
            if state.status:
                raise  # half an answer must not look like a whole one: the server cuts the connection
            problem = RefusedError("internal", "something went wrong here; the log says more under this request's id")
        await problem_answer(problem, self.metrics)(scope, receive, state.send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        limits, keys = self.settings.limits, self.settings.keys
        # Our own server did this while parsing (protocol.py). Others, as Ray Serve's proxy, pass on what they are sent.
        target = scope.get("raw_path", b"") + b"?" + scope.get("query_string", b"")
        check_head(target, scope["headers"], limits)
        access.check_host(headers, self.settings.hosts)
        access.check_site(scope["method"], headers)
        path = str(scope["path"]).removeprefix(scope.get("root_path", "")) or "/"  # below a proxy's prefix
        if keys and not OPEN.fullmatch(path) and access.matching_key(headers, keys) is None:
            raise RefusedError("unauthorized", "send the API key as 'Authorization: Bearer KEY'")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limits.body_bytes:
            raise _body_too_long(limits)

    def _limited(self, receive: Receive, state: RequestState, client: str) -> Receive:
        """A `receive` that refuses bodies over the limit, also those that do not say how long they are.

        Capacity is taken for what has arrived, not for what was promised: to promise much and send nothing holds none.
        """

        async def limited() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            state.body_bytes += size
            if state.body_bytes > self.settings.limits.body_bytes:
                raise _body_too_long(self.settings.limits)
            state.reservations += self.bodies.reserve(client, {"bytes": size})
            return message

        return limited

    def _record(self, scope: Scope, state: RequestState) -> None:
        seconds = time.monotonic() - state.began
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
        self.metrics.requests.labels(route, method, str(state.status)).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        facts = {"route": route, "method": method, "status": state.status, "ms": round(seconds * 1000, 1)}
        log.info("request", extra={"facts": facts | scope.get("state", {}).get("facts", {})})


def _body_too_long(limits: Limits) -> RefusedError:
    return RefusedError("too-large", f"the request is too long; at most {limits.body_bytes:,} bytes are taken")
