"""The HTTP/1.1 server: bounds on what is read of a request, and for how long, before the app is called.

The server runs h11 on asyncio, never httptools, uvloop or a WebSocket library that happens to be installed: httptools
keeps any number of header fields, of any length, before the app is called.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import h11
from fastapi import FastAPI
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from patchcleanser.service import middleware
from patchcleanser.service.access import Proxies
from patchcleanser.service.config import Limits
from patchcleanser.service.problems import RefusedError
from patchcleanser.service.service import Service

log = logging.getLogger("patchcleanser.service")

READ_BYTES = 16 * 1024
"""Read at a time from one connection. A head within one read is parsed at once, so this bounds what that costs."""
LINGER_SECONDS = 2.0
"""How long the rest of a refused request is read and dropped. A connection that is closed with bytes unread is reset,
and its client may never see the answer."""
FREE_CHUNKS, MEAN_CHUNK_BYTES = 1024, 512
"""Every chunk of a body costs the parser the same, even one byte. Beyond the first ones they must be this long on
average."""


class BoundedConnection(h11.Connection):
    """h11's parser, with limits on the address, the number of header and trailer fields, and tiny chunks."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(h11.SERVER, limits.header_bytes)
        self.problem: RefusedError | None = None
        """Why the last event was refused."""
        self._limits, self._chunks, self._body_bytes = limits, 0, 0

    def next_event(self) -> Any:
        """As h11 does, RemoteProtocolError if the request is malformed or over a limit."""
        in_head = self.their_state is h11.IDLE
        try:
            event = super().next_event()
            self._check(event)
        except h11.RemoteProtocolError as error:
            self.problem = self._malformed(error.error_status_hint, in_head)
            raise
        except RefusedError as problem:
            self.problem = problem
            raise h11.RemoteProtocolError(problem.message, error_status_hint=problem.status) from None
        return event

    def _check(self, event: Any) -> None:
        if isinstance(event, h11.Request):
            self._chunks = self._body_bytes = 0
            middleware.check_head(event.target, list(event.headers), self._limits)
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._body_bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._body_bytes // MEAN_CHUNK_BYTES:
                message = f"the body comes in chunks of less than {MEAN_CHUNK_BYTES} bytes; send larger ones"
                raise RefusedError("bad-request", message)
        elif isinstance(event, h11.EndOfMessage):
            middleware.check_head(b"", list(event.headers), self._limits)

    def _malformed(self, status: int, in_head: bool) -> RefusedError:
        if status != HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            return RefusedError("bad-request", "this is not valid HTTP/1.1")
        more = f"more than {self._limits.header_bytes:,}"
        if in_head and b"\n" not in self.trailing_data[0]:
            return middleware.url_too_long(self._limits, more)
        return middleware.headers_too_large(self._limits, more)


class BoundedProtocol(H11Protocol, asyncio.BufferedProtocol):
    """One connection: small reads, deadlines, and an answer to what the parser refuses.

    It is a BufferedProtocol so that the loop reads no more at a time than its buffer holds.
    """

    conn: BoundedConnection

    def __init__(
        self, *args: Any, limits: Limits, metrics: middleware.Metrics, proxies: Proxies, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.conn = BoundedConnection(limits)
        self._limits, self._metrics, self._proxies = limits, metrics, proxies
        self._buffer = bytearray(READ_BYTES)
        self._phase, self._refused = "", False
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, unless there are too many."""
        super().connection_made(transport)
        connection: socket.socket = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio asks for this only if the listening socket names its protocol.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=0)  # so that pause_writing is called whenever a client does not read
        address = self.client[0] if self.client else ""
        same = sum(other.client is not None and other.client[0] == address for other in self.connections)  # type: ignore[union-attr]
        if len(self.connections) > self._limits.connections:
            self._refuse(RefusedError("overloaded", "too many connections are open; try again later", retry_after=1))
        elif same > self._limits.client_connections and address not in self._proxies:
            most = self._limits.client_connections
            message = f"{same} connections are open from this address; at most {most} are taken; close some"
            self._refuse(RefusedError("too-many-requests", message, retry_after=1))
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._set_timer(0, None)
        self.resume_writing()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what was read, unless the request was refused already."""
        if not self._refused:
            self.data_received(bytes(self._buffer[:nbytes]))
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self.conn.problem or RefusedError("bad-request", "this is not valid HTTP/1.1"))

    def pause_writing(self) -> None:
        """Give a client that does not read as long as a request may take."""
        super().pause_writing()
        self._write_timer = self._write_timer or self.loop.call_later(self._limits.deadline, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch(self) -> None:
        """Start the timer of the phase that the connection is in; the app has its own for bodies and answers."""
        if self._refused or self.transport.is_closing():
            return
        state, phase = self.conn.their_state, ""
        if state is h11.IDLE:
            phase = "head"
        elif state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            phase = "rest"  # answered before the body was there
        if phase != self._phase:
            self._phase = phase
            seconds = self._limits.head_seconds if phase == "head" else LINGER_SECONDS
            self._set_timer(seconds, self._late if phase else None)

    def _late(self) -> None:
        if self._phase == "head" and self.conn.trailing_data[0]:
            message = f"the headers did not arrive within {self._limits.head_seconds:g} s; send them at once"
            self._refuse(RefusedError("body-too-slow", message))
        else:
            self.transport.abort()

    def _refuse(self, problem: RefusedError) -> None:
        """Send the problem, drop what still arrives, and close."""
        self._refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # to the app, the client has left
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        self._unset_keepalive_if_required()
        self.transport.write(_raw_answer(problem, self._metrics))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._set_timer(LINGER_SECONDS, self.transport.abort)

    def _set_timer(self, seconds: float, action: Callable[[], None] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if action is None else self.loop.call_later(seconds, action)


def server_config(app: FastAPI, *, root_path: str = "") -> Config:
    """Settings of a uvicorn server that reads requests with BoundedProtocol."""
    service: Service = app.state.service
    limits, proxies = service.settings.limits, Proxies(service.settings.proxies)
    http = partial(BoundedProtocol, limits=limits, metrics=service.metrics, proxies=proxies)
    return Config(
        app,
        http=cast("type[asyncio.Protocol]", http),
        loop="asyncio",
        ws="none",
        root_path=root_path,
        proxy_headers=False,  # access.py reads X-Forwarded-For
        log_config=None,
        access_log=False,
        server_header=False,
    )


def _raw_answer(problem: RefusedError, metrics: middleware.Metrics) -> bytes:
    """A whole HTTP response, for a request that never reaches the app."""
    request_id = uuid.uuid4().hex
    token = middleware.REQUEST_ID.set(request_id)
    answer = middleware.problem_answer(problem, metrics)
    log.info("a request was refused", extra={"facts": {"code": problem.code}})
    middleware.REQUEST_ID.reset(token)
    fields = [*answer.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
    head = f"HTTP/1.1 {answer.status_code} {HTTPStatus(answer.status_code).phrase}\r\n".encode()
    return head + b"".join(name + b": " + value + b"\r\n" for name, value in fields) + b"\r\n" + bytes(answer.body)
