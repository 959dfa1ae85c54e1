"""Structured logs: one JSON object a line."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any, TextIO

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The request at hand."""


class JsonLines(logging.Formatter):
    """Every record as one line of JSON, with the id of the request it belongs to."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a trace becomes a string in it."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        if (request := getattr(record, "request_id", None) or REQUEST_ID.get()) is not None:
            line["request_id"] = request
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def configure(stream: TextIO, level: str = "info") -> None:
    """Send our own and the web server's records to a stream, as JSON lines."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logging.captureWarnings(True)  # Pillow warns of odd pictures
    for name in ("patchcleanser.service", "uvicorn", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn.access").disabled = True  # ours say more
