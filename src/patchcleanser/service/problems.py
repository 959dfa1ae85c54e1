"""Everything that an answer may complain about: codes that stay the same, and their HTTP status."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """One documented error."""

    status: int
    words: str


PROBLEMS: dict[str, Kind] = {
    "bad-request": Kind(400, "The body is not what its content type says, or the request is not understood."),
    "unauthorized": Kind(401, "The API key is missing or wrong."),
    "cross-site": Kind(403, "Another site's page sent this from a browser."),
    "not-found": Kind(404, "There is nothing at this address."),
    "method-not-allowed": Kind(405, "This address does not take this method."),
    "body-too-slow": Kind(408, "The request did not arrive whole before its deadline."),
    "too-late": Kind(408, "There was no answer before the deadline that the request named; the work was dropped."),
    "too-large": Kind(413, "The body, a file, the number of files or of pixels is over a limit."),
    "url-too-long": Kind(414, "The address of the request is too long."),
    "unsupported-media": Kind(415, "The content type is not taken, or a file is no picture of an allowed format."),
    "wrong-host": Kind(421, "The Host header names a host that is not served here."),
    "invalid": Kind(422, "A field is missing, unknown or out of range."),
    "bad-image": Kind(422, "An image is damaged, takes too long to decode, or cannot be classified."),
    "bad-fit": Kind(422, "The threat's patch, or masks for it, do not fit an image of this size."),
    "too-many-requests": Kind(429, "This client has as much here as it may have. Try again after Retry-After."),
    "headers-too-large": Kind(431, "The request has too many header fields, or they are too long."),
    "internal": Kind(500, "A fault of the service; the log says more under the request's id."),
    "classifier-failed": Kind(500, "The classifier gave no usable answer for an image."),
    "overloaded": Kind(503, "Too much is waiting already. Try again after the time in Retry-After."),
    "not-ready": Kind(503, "The service is shutting down."),
    "deadline": Kind(504, "There was no answer before the service's own deadline; the work was dropped."),
}
"""By code. A code keeps its meaning within /v1; messages may change."""

CLIENT_GONE = 499
"""What logs and metrics say of a request whose client left: nobody gets an answer."""


class RefusedError(Exception):
    """What went wrong, said to the client. Never holds a path or the text of a foreign exception."""

    def __init__(self, code: str, message: str, *, image: int | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.image, self.retry_after = code, message, image, retry_after

    @property
    def status(self) -> int:
        """The HTTP status."""
        return PROBLEMS[self.code].status


class ClientGoneError(Exception):
    """The client left before its answer was there."""


def code_for(status: int) -> str:
    """The code of an error that the web framework raised itself."""
    return {404: "not-found", 405: "method-not-allowed"}.get(status, "bad-request" if status < 500 else "internal")
