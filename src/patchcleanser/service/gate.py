"""What every request passes: an id, a key, limits on its body, a line in the log, headers that bind browsers."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from patchcleanser.service.logs import REQUEST_ID
from patchcleanser.service.metrics import Metrics
from patchcleanser.service.problems import CLIENT_GONE, ClientGoneError, RefusedError
from patchcleanser.service.room import NoRoomError, Place, Room
from patchcleanser.service.schemas import ErrorAnswer, ErrorFacts
from patchcleanser.service.settings import Settings

log = logging.getLogger("patchcleanser.service")

OPEN = re.compile(r"/|/healthz|/readyz|/page/[a-z.-]+")
"""Addresses that need no key."""
USABLE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
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


def problem_answer(problem: RefusedError) -> JSONResponse:
    """A problem, as sent."""
    facts = ErrorFacts(
        code=problem.code, message=problem.message, request_id=REQUEST_ID.get() or "", image=problem.image
    )
    headers = {} if problem.retry_after is None else {"Retry-After": str(problem.retry_after)}
    if problem.code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(ErrorAnswer(error=facts).model_dump(), status_code=problem.status, headers=headers)


class Gate:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self.bodies = Room(bytes=settings.limits.queue_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request through, or not; either way it is answered and noted."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if USABLE_ID.fullmatch(given) else uuid.uuid4().hex
        token = REQUEST_ID.set(request_id)
        passage = _Passage(scope, send, request_id)
        try:
            await self._answer(scope, headers, receive, passage)
        finally:
            passage.leave()
            self._note(scope, passage)
            REQUEST_ID.reset(token)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, passage: _Passage) -> None:
        try:
            self._check(scope, headers)
            await self.app(scope, self._limited(receive, passage), passage.send)
        except (ClientGoneError, ClientDisconnect):
            passage.status = CLIENT_GONE
        except RefusedError as refused:
            await self._refuse(refused, scope, receive, passage)
        except Exception:
            log.exception("a request failed")
            if passage.started:
                raise  # half an answer must not look like a whole one: the server cuts the connection
            words = "something went wrong here; the log says more under this request's id"
            await self._refuse(RefusedError("internal", words), scope, receive, passage)

    async def _refuse(self, problem: RefusedError, scope: Scope, receive: Receive, passage: _Passage) -> None:
        self.metrics.problems.labels(problem.code).inc()
        await problem_answer(problem)(scope, receive, passage.send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if scope["method"] == "POST" and headers.get("sec-fetch-site") == "cross-site":
            raise RefusedError("cross-site", "requests from other sites' pages are not taken")
        key = self.settings.api_key
        if key is not None and not OPEN.fullmatch(_path(scope)) and not _same(key, _sent_key(headers)):
            raise RefusedError("unauthorized", "send the API key as 'Authorization: Bearer KEY'")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.settings.limits.body_bytes:
            raise _too_long(self.settings.limits.body_bytes)

    def _limited(self, receive: Receive, passage: _Passage) -> Receive:
        """A way in that refuses bodies over the limit, also those that do not say how long they are.

        Room is taken for what has arrived, not for what was promised: who promises much and sends nothing holds none.
        """
        most = self.settings.limits.body_bytes

        async def limited() -> Message:
            message = await receive()
            arrived = len(message.get("body", b""))
            passage.arrived += arrived
            if passage.arrived > most:
                raise _too_long(most)
            try:
                passage.places.append(self.bodies.take(bytes=arrived))
            except NoRoomError:
                words = "too much is arriving already; try again later"
                raise RefusedError("overloaded", words, retry_after=1) from None
            return message

        return limited

    def _note(self, scope: Scope, passage: _Passage) -> None:
        seconds = time.monotonic() - passage.began
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
        self.metrics.requests.labels(route, method, str(passage.status)).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        facts = {"route": route, "method": method, "status": passage.status, "ms": round(seconds * 1000, 1)}
        facts |= scope.get("state", {}).get("facts", {})
        log.info("request", extra={"request_id": passage.request_id, "facts": facts})


class _Passage:
    """What becomes of one request, and its way out."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.request_id, self._send = request_id, send
        self.began, self.status, self.started = time.monotonic(), 0, False
        self.arrived, self.places = 0, list[Place]()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            for name, value in HEADERS.items():
                headers[name] = value
        await self._send(message)

    def leave(self) -> None:
        """Give back the room that its body took."""
        for place in self.places:
            place.leave()


def _too_long(most: int) -> RefusedError:
    return RefusedError("too-large", f"the request is too long; at most {most:,} bytes are taken")


def _path(scope: Scope) -> str:
    """The address below the prefix under which a proxy serves us."""
    return str(scope["path"]).removeprefix(scope.get("root_path", "")) or "/"


def _sent_key(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _same(key: str, sent: str) -> bool:
    """Compared in constant time, so that answers do not tell how much of a guess was right."""
    return hmac.compare_digest(key.encode(), sent.encode())
