"""Client: a typed client of a running service."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
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

Answer = TypeVar("Answer", bound=schemas.Schema)

LONGEST_WAIT = 30
"""Seconds between two tries, whatever the service asks for."""


class Client:
    """A client of `patchcleanser serve`; end it with close() or a with statement.

    Where the service is overloaded, or a process behind it died with the request, it tries again after
    the time that the service names, `retries` times: a request can be repeated. Every other failure is
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def predict(
        self, images: Iterable[Picture], *, masks: int | None = None, details: bool = False
    ) -> list[schemas.Recovered | schemas.Detected]:
        """Defended labels, in the order of the images."""
        return self._send(schemas.PredictAnswer, "v1/predict", images, {"masks": masks, "details": details}).predictions

    def certify(
        self, images: Iterable[Picture], labels: Sequence[int], *, masks: int | None = None, maps: bool = False
    ) -> list[schemas.RecoveryCertificate | schemas.DetectionCertificate]:
        """Certificates of clean images with their true labels."""
        fields = {"masks": masks, "maps": maps, "labels": [str(int(label)) for label in labels]}
        return self._send(schemas.CertifyAnswer, "v1/certify", images, fields).certificates

    def masks(self, height: int, width: int, *, masks: int | None = None) -> schemas.MasksAnswer:
        """The masks for images of a size, and what they cost."""
        params = {"height": height, "width": width} | ({} if masks is None else {"masks": masks})
        return self._request(schemas.MasksAnswer, "GET", "v1/masks", params=params)

    def model(self) -> schemas.ModelAnswer:
        """Which model answers, against which threat, within which limits."""
        return self._request(schemas.ModelAnswer, "GET", "v1/model")

    def ready(self) -> bool:
        """Whether the service takes requests."""
        try:
            return self._http.get("readyz").status_code == 200
        except httpx.TransportError:
            return False

    def _send(self, kind: type[Answer], route: str, images: Iterable[Picture], fields: dict[str, Any]) -> Answer:
        if isinstance(images, (str, bytes, Path)):
            raise InputError(f"images come as a list, even a single one; got a {type(images).__name__}")
        files = [("image", (f"{n}", _encode(image, n))) for n, image in enumerate(images)]
        if not files:
            raise InputError("there must be at least 1 image, got none")
        data = {k: str(v).lower() if isinstance(v, bool) else v for k, v in fields.items() if v is not None}
        return self._request(kind, "POST", route, files=files, data=data)

    def _request(self, kind: type[Answer], method: str, route: str, **body: Any) -> Answer:
        for retries in range(self._retries, -1, -1):
            try:
                response = self._http.request(method, route, **body)
            except httpx.HTTPError as error:
                why = f"no answer from {self._http.base_url}: {error}; start the service with: patchcleanser serve"
                raise ServiceError(why, code="unreachable") from error
            if not retries or not _may_pass(response):
                break
            seconds = response.headers.get("retry-after", "")  # a proxy may write a date
            time.sleep(min(LONGEST_WAIT, int(seconds)) if seconds.isdigit() else 1)
        if not response.is_success:
            raise _service_error(response)
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            message = "the answer is not one of patchcleanser's, or of another version; is the address right?"
            raise ServiceError(message, code="unknown", status=200) from error


def _may_pass(response: httpx.Response) -> bool:
    """Whether another try may succeed: too much at once, or an error of a proxy and not of the service."""
    if response.status_code in (429, 503):
        return True
    return response.status_code in (500, 502, 504) and "json" not in response.headers.get("content-type", "")


def _service_error(response: httpx.Response) -> ServiceError:
    """The service's error, or that of a proxy in between."""
    try:
        facts = schemas.ErrorAnswer.model_validate_json(response.content).error
    except ValueError:
        return ServiceError(f"HTTP {response.status_code}", code="unknown", status=response.status_code)
    return ServiceError(facts.message, code=facts.code, status=response.status_code, request_id=facts.request_id)


def _encode(image: Picture, number: int) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, (str, Path)):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {image}: {error.strerror}") from error
    from PIL import Image

    if not isinstance(image, Image.Image):
        # Only here, so that a client of encoded images needs no torch.
        from patchcleanser.classifiers.preprocessing import checked_image
        from patchcleanser.data.codec import as_picture

        image = as_picture(checked_image(image, None, number))
    file = BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()
