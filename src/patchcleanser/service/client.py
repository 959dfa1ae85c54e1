"""Client: ask a running service, typed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from patchcleanser.errors import DataError, InputError, MissingDependencyError, ServiceError

try:
    import httpx
    from pydantic import ValidationError

    from patchcleanser.service import schemas
except ImportError as error:
    raise MissingDependencyError.of(error.name or "httpx", "serve") from error

Picture = Any
"""Encoded bytes, a path, a PIL image, or a tensor or array [C, H, W] in [0, 1]."""

Answer = TypeVar("Answer", bound=schemas.Model)

LONGEST_WAIT = 30
"""Seconds that a client waits between two tries, whatever the service asks for."""


class Client:
    """Asks a service started by `patchcleanser serve`; give it back with close() or a with statement.

    Where the service is overloaded, or a process behind it died with the request, it tries again after
    the time that the service names, `retries` times: asking twice does no harm. Every other trouble is
    a ServiceError with the service's code and the request's id.
    """

    def __init__(
        self,
        address: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        retries: int = 3,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if retries < 0:
            raise InputError(f"retries is 0 or more, got {retries}")
        if not address.startswith(("http://", "https://")):
            raise InputError(f"an address begins with http:// or https://, got {address!r}")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # A trailing slash, so that a service behind a prefix is found there.
        base = address.rstrip("/") + "/"
        self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout, transport=transport)
        self._retries = retries

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def predict(
        self, images: Iterable[Picture], *, masks: int | None = None, details: bool = False
    ) -> list[schemas.Recovered | schemas.Detected]:
        """Defended labels, in the order of the images."""
        answer = self._send("v1/predict", images, {"masks": masks, "details": details})
        return _understood(schemas.PredictAnswer, answer).predictions

    def certify(
        self, images: Iterable[Picture], labels: Sequence[int], *, masks: int | None = None, maps: bool = False
    ) -> list[schemas.RecoveryCertificate | schemas.DetectionCertificate]:
        """Certificates of clean images with their true labels."""
        fields = {"masks": masks, "maps": maps, "labels": [str(int(label)) for label in labels]}
        return _understood(schemas.CertifyAnswer, self._send("v1/certify", images, fields)).certificates

    def masks(self, height: int, width: int, *, masks: int | None = None) -> schemas.MasksAnswer:
        """The masks for images of a size, and what they cost."""
        asked = {"height": height, "width": width} | ({} if masks is None else {"masks": masks})
        return _understood(schemas.MasksAnswer, self._ask("GET", "v1/masks", params=asked))

    def model(self) -> schemas.ModelAnswer:
        """Which model answers, against which threat, within which limits."""
        return _understood(schemas.ModelAnswer, self._ask("GET", "v1/model"))

    def ready(self) -> bool:
        """Whether the service takes requests."""
        try:
            return self._http.get("readyz").status_code == 200
        except httpx.TransportError:
            return False

    def _send(self, route: str, images: Iterable[Picture], fields: dict[str, Any]) -> bytes:
        if isinstance(images, (str, bytes, Path)):
            raise InputError("images come as a list, also a single one")
        files = [("image", (f"{n}", _encoded(image, n))) for n, image in enumerate(images)]
        if not files:
            raise InputError("there must be at least 1 image, got none")
        said = {k: str(v).lower() if isinstance(v, bool) else v for k, v in fields.items() if v is not None}
        return self._ask("POST", route, files=files, data=said)

    def _ask(self, method: str, route: str, **body: Any) -> bytes:
        for left in range(self._retries, -1, -1):
            try:
                response = self._http.request(method, route, **body)
            except httpx.HTTPError as error:
                raise ServiceError(f"no answer from {self._http.base_url}: {error}", code="unreachable") from error
            if not left or not _may_pass(response):
                break
            said = response.headers.get("retry-after", "")  # a proxy may write a date
            time.sleep(min(LONGEST_WAIT, int(said)) if said.isdigit() else 1)
        if response.is_success:
            return response.content
        raise _trouble(response)


def _understood(kind: type[Answer], content: bytes) -> Answer:
    """An answer, typed; what another server says in its place is not one."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        words = "the answer is not one of patchcleanser's, or of another version; is the address right?"
        raise ServiceError(words, code="unknown", status=200) from error


def _may_pass(response: httpx.Response) -> bool:
    """Whether it may be otherwise next time: too much at once, or an error of a proxy, not of the service."""
    if response.status_code in (429, 503):
        return True
    return response.status_code in (500, 502, 504) and "json" not in response.headers.get("content-type", "")


def _trouble(response: httpx.Response) -> ServiceError:
    """What the service said, or what a proxy in between did."""
    try:
        said = schemas.ErrorAnswer.model_validate_json(response.content).error
    except ValueError:
        return ServiceError(f"HTTP {response.status_code}", code="unknown", status=response.status_code)
    return ServiceError(said.message, code=said.code, status=response.status_code, request_id=said.request_id)


def _encoded(image: Picture, number: int) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, (str, Path)):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {image}: {error.strerror}") from error
    file = BytesIO()
    _picture(image, number).save(file, format="PNG")
    return file.getvalue()


def _picture(image: Picture, number: int) -> Any:
    from PIL import Image

    if isinstance(image, Image.Image):
        return image
    # Only here, so that a client of encoded pictures needs no torch.
    from patchcleanser.classifiers.preprocessing import checked_image
    from patchcleanser.data.codec import as_picture

    return as_picture(checked_image(image, None, number))
