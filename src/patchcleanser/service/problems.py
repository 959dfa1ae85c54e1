"""The errors of the HTTP API: codes that keep their meaning, and their status."""

from __future__ import annotations

PROBLEMS: dict[str, tuple[int, str]] = {
    "bad-request": (400, "The body is not what its content type says, or the request is not understood."),
    "unauthorized": (401, "The API key is missing or wrong."),
    "cross-site": (403, "Another site's page sent this from a browser."),
    "not-found": (404, "There is nothing at this address."),
    "method-not-allowed": (405, "This address does not take this method."),
    "body-too-slow": (408, "The request did not arrive whole before its deadline."),
    "too-late": (408, "There was no answer before the deadline that the request named; the work was dropped."),
    "too-large": (413, "The body, a file, the number of files or of pixels is over a limit."),
    "url-too-long": (414, "The address of the request is too long."),
    "unsupported-media": (415, "The content type is not taken, or a file is no picture of an allowed format."),
    "wrong-host": (421, "The Host header names a host that is not served here."),
    "invalid": (422, "A field is missing, unknown or out of range."),
    "bad-image": (422, "An image is damaged, takes too long to decode, or cannot be classified."),
    "bad-fit": (422, "The threat's patch, or masks for it, do not fit an image of this size."),
    "too-many-requests": (429, "This client has as much here as it may have. Try again after Retry-After."),
    "headers-too-large": (431, "The request has too many header fields, or they are too long."),
    "internal": (500, "A fault of the service; the log says more under the request's id."),
    "classifier-failed": (500, "The classifier gave no usable answer for an image."),
    "overloaded": (503, "Too much is waiting already. Try again after the time in Retry-After."),
    "not-ready": (503, "The service is shutting down."),
    "deadline": (504, "There was no answer before the service's own deadline; the work was dropped."),
}
"""HTTP status and description by code. A code keeps its meaning within /v1; messages may change."""

CLIENT_GONE = 499
"""Status in logs and metrics of a request whose client left: nobody gets an answer."""


class RefusedError(Exception):
    """An error that the client is told. Never holds a path or the text of a foreign exception."""

    def __init__(self, code: str, message: str, *, image: int | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.image, self.retry_after = code, message, image, retry_after

    @property
    def status(self) -> int:
        return PROBLEMS[self.code][0]


class ClientGoneError(Exception):
    """The client left before its answer was there."""
