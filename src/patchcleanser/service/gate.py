"""What every request passes: an id, a key, limits on its body, a line in the log, headers that bind browsers."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from patchcleanser.service.clients import Proxies, check_host, check_site, client_name, matching_key
from patchcleanser.service.logs import REQUEST_ID
from patchcleanser.service.metrics import Metrics
from patchcleanser.service.problems import CLIENT_GONE, ClientGoneError, RefusedError
from patchcleanser.service.room import NoRoomError, OverShareError, Place, Room
from patchcleanser.service.schemas import ErrorAnswer, ErrorFacts
from patchcleanser.service.settings import Limits, ServiceSettings

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


def check_head(target: bytes, headers: Sequence[tuple[bytes, bytes]], limits: Limits) -> None:
    """Refuse a request whose address or header fields are over a limit."""
    if len(target) > limits.url_bytes:
        words = f"the address has {len(target):,} bytes; at most {limits.url_bytes:,} are taken; send data in the body"
        raise RefusedError("url-too-long", words)
    if len(headers) > limits.headers:
        words = f"the request has {len(headers):,} header fields; at most {limits.headers:,} are taken; send fewer"
        raise RefusedError("headers-too-large", words)
    size = len(target) + sum(len(name) + len(value) + 4 for name, value in headers)  # 4: a colon, a space, CRLF
    if size > limits.header_bytes:
        raise headers_too_large(limits, f"{size:,}")


def headers_too_large(limits: Limits, got: str) -> RefusedError:
    """The refusal of a request whose header fields have too many bytes."""
    words = (
        f"the request line and headers have {got} bytes; at most {limits.header_bytes:,} are taken; send shorter ones"
    )
    return RefusedError("headers-too-large", words)


class Gate:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, settings: ServiceSettings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        limits = settings.limits
        self.bodies = Room(bytes=limits.queue_bytes, shares={"bytes": limits.client_bytes})
        self.proxies = Proxies(settings.proxies)

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
            client = client_name(scope, headers, self.settings.keys, self.proxies)
            scope.setdefault("state", {})["client"] = client
            await self.app(scope, self._limited(receive, passage, client), passage.send)
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
        # Our own server did this while parsing (protocol.py); others, as Ray Serve's proxy, pass on what they are sent.
        target = scope.get("raw_path", b"") + b"?" + scope.get("query_string", b"")
        check_head(target, scope["headers"], self.settings.limits)
        check_host(headers, self.settings.hosts)
        check_site(scope["method"], headers)
        keys = self.settings.keys
        if keys and not OPEN.fullmatch(_path(scope)) and matching_key(headers, keys) is None:
            raise RefusedError("unauthorized", "send the API key as 'Authorization: Bearer KEY'")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.settings.limits.body_bytes:
            raise _too_long(self.settings.limits.body_bytes)

    def _limited(self, receive: Receive, passage: _Passage, client: str) -> Receive:
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
                passage.places.append(self.bodies.take(client, bytes=arrived))
            except NoRoomError:
                words = "too much is arriving already; try again later"
                raise RefusedError("overloaded", words, retry_after=1) from None
            except OverShareError as error:
                raise RefusedError("too-many-requests", str(error), retry_after=1) from None
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
