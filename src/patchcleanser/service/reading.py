"""From a request's body to the bytes of its images and its options; limits come before work."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request

from patchcleanser.service.problems import RefusedError
from patchcleanser.service.schemas import CertifyBody, CertifyOptions, Options, PredictBody, PredictOptions
from patchcleanser.service.settings import Limits

Wanted = TypeVar("Wanted", bound=Options)

LISTS = {"labels"}
"""Form fields that may come several times."""
FIELDS = 64
"""Form fields besides files and their labels, which come one by one; values in JSON besides those."""
BODIES: dict[type[Options], type[PredictBody] | type[CertifyBody]] = {
    PredictOptions: PredictBody,
    CertifyOptions: CertifyBody,
}


@dataclass(frozen=True)
class Asked(Generic[Wanted]):
    """Encoded images, and what is asked of them."""

    images: list[bytes]
    options: Wanted


async def read(request: Request, options: type[Wanted], limits: Limits) -> Asked[Wanted]:
    """The images of a request, multipart or JSON, with its options; RefusedError if there is something wrong."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        asked = await _json(request, options, limits)
    elif kind == "multipart/form-data":
        asked = await _form(request, options, limits)
    else:
        raise RefusedError("unsupported-media", "send multipart/form-data with files, or application/json with base64")
    if not asked.images:
        raise RefusedError("invalid", "there is no image in the request; send at least one")
    labels = getattr(asked.options, "labels", None)
    if labels is not None and len(labels) != len(asked.images):
        raise RefusedError("invalid", f"{len(labels)} labels for {len(asked.images)} images")
    return asked


def checked_pixels(size: tuple[int, int] | None, number: int, limits: Limits) -> int:
    """How many pixels an image has, by the size in its header; RefusedError if too many, or if it has no size."""
    if size is None:
        words = f"image {number} is empty, damaged, or none of {', '.join(limits.formats)}"
        raise RefusedError("unsupported-media", words, image=number)
    if size[0] * size[1] > limits.pixels:
        raise too_many_pixels(number, limits)
    return size[0] * size[1]


def too_many_pixels(number: int, limits: Limits) -> RefusedError:
    """The refusal of an image that is too large."""
    words = f"image {number} has too many pixels; at most {limits.pixels:,} are taken"
    return RefusedError("too-large", words, image=number)


async def _json(request: Request, options: type[Wanted], limits: Limits) -> Asked[Wanted]:
    content = await request.body()
    _require_few_values(content, limits)
    try:
        body = BODIES[options].model_validate_json(content)
    except ValidationError as error:
        raise _invalid(error) from None
    if len(body.images) > limits.files:
        raise _too_many(limits)
    images = [_from_base64(number, text, limits) for number, text in enumerate(body.images)]
    return Asked(images, options.model_validate(body.model_dump(exclude={"images"})))


def _require_few_values(content: bytes, limits: Limits) -> None:
    """Refuse JSON of a million values: each wrong one would become an error of its own, at hundreds of times its bytes.

    Base64 has no comma and no bracket, so those of an honest body are as many as its images, labels and options.
    """
    if sum(map(content.count, (b",", b"[", b"{"))) > 2 * limits.files + FIELDS:
        raise RefusedError("too-large", f"too many values in the JSON; at most {limits.files} images are taken")


def _from_base64(number: int, text: str, limits: Limits) -> bytes:
    if len(text) * 3 // 4 > limits.file_bytes + 2:
        raise _too_long(number, limits)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RefusedError("invalid", f"image {number} is not base64", image=number) from None


async def _form(request: Request, options: type[Wanted], limits: Limits) -> Asked[Wanted]:
    fields: dict[str, list[str]] = {}
    images: list[bytes] = []
    # One file more than allowed is let through to be refused by name here, not as a malformed body.
    most = {"max_files": limits.files + 1, "max_fields": limits.files + FIELDS}
    async with request.form(**most, max_part_size=4096) as form:
        for name, value in form.multi_items():
            if not isinstance(value, UploadFile):
                fields.setdefault(name, []).append(value)
                continue
            if name != "image":
                raise RefusedError("invalid", "files come in the field 'image', as often as there are images")
            if len(images) == limits.files:
                raise _too_many(limits)
            if (value.size or 0) > limits.file_bytes:
                raise _too_long(len(images), limits)
            images.append(await value.read())
    return Asked(images, _form_options(fields, options))


def _form_options(fields: dict[str, list[str]], options: type[Wanted]) -> Wanted:
    for name, values in fields.items():
        if len(values) > 1 and name not in LISTS:
            raise RefusedError("invalid", "an option was given more than once")
    try:
        return options.model_validate({k: v if k in LISTS else v[0] for k, v in fields.items()})
    except ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: ValidationError) -> RefusedError:
    """The first thing that is wrong, without what was sent."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return RefusedError("bad-request", "the body is not valid JSON")
    where = ".".join(str(part)[:40] for part in first["loc"])
    return RefusedError("invalid", f"{where}: {first['msg']}" if where else first["msg"])


def _too_many(limits: Limits) -> RefusedError:
    return RefusedError("too-large", f"too many images in one request; at most {limits.files} are taken")


def _too_long(number: int, limits: Limits) -> RefusedError:
    words = f"image {number} is too long; at most {limits.file_bytes:,} bytes are taken"
    return RefusedError("too-large", words, image=number)
