"""Parse a request's body into encoded images and options; limits are checked before work is done."""

from __future__ import annotations

import base64
import binascii
from typing import TypeVar

from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request

from patchcleanser.service.config import Limits
from patchcleanser.service.problems import RefusedError
from patchcleanser.service.schemas import CertifyBody, CertifyOptions, Options, PredictBody, PredictOptions

OptionsT = TypeVar("OptionsT", bound=Options)

FIELDS = 64
"""Form fields besides files and their labels, which come one by one; values in JSON besides those."""
BODIES: dict[type[Options], type[PredictBody] | type[CertifyBody]] = {
    PredictOptions: PredictBody,
    CertifyOptions: CertifyBody,
}


NO_NUMBER = ("int_parsing", "int_type", "int_from_float")
"""Pydantic's types of errors where a whole number is expected."""


async def parse_request(request: Request, kind: type[OptionsT], limits: Limits) -> tuple[list[bytes], OptionsT]:
    """The encoded images and the options of a request, multipart or JSON; RefusedError if it cannot be used."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media == "application/json":
        images, options = await _parse_json(request, kind, limits)
    elif media == "multipart/form-data":
        images, options = await _parse_form(request, kind, limits)
    else:
        raise RefusedError("unsupported-media", "send multipart/form-data with files, or application/json with base64")
    if not images:
        raise RefusedError("invalid", "there is no image in the request; send at least one")
    if isinstance(options, CertifyOptions) and len(options.labels) != len(images):
        raise RefusedError("invalid", f"{len(options.labels)} labels for {len(images)} images; send one for each")
    return images, options


async def _parse_json(request: Request, kind: type[OptionsT], limits: Limits) -> tuple[list[bytes], OptionsT]:
    content = await request.body()
    # Of a million wrong values each would become an error of its own, at hundreds of times its bytes. Base64 has no
    # comma and no bracket, so those of an honest body are as many as its images, labels and options.
    if sum(map(content.count, (b",", b"[", b"{"))) > 2 * limits.files + FIELDS:
        raise RefusedError("too-large", f"too many values in the JSON; at most {limits.files} images are taken")
    try:
        body = BODIES[kind].model_validate_json(content)
    except ValidationError as error:
        raise _invalid(error) from None
    if len(body.images) > limits.files:
        raise _too_many(limits)
    images = [_from_base64(number, text, limits) for number, text in enumerate(body.images)]
    return images, kind.model_validate(body.model_dump(exclude={"images"}))


def _from_base64(number: int, text: str, limits: Limits) -> bytes:
    if len(text) * 3 // 4 > limits.file_bytes + 2:
        raise _too_long(number, limits)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RefusedError("invalid", f"image {number} is not base64", image=number) from None


async def _parse_form(request: Request, kind: type[OptionsT], limits: Limits) -> tuple[list[bytes], OptionsT]:
    fields: dict[str, list[str]] = {}
    images: list[bytes] = []
    # One file more than allowed is let through to be refused by name here, not as a malformed body.
    bounds = {"max_files": limits.files + 1, "max_fields": limits.files + FIELDS}
    async with request.form(**bounds, max_part_size=4096) as form:
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
    if any(len(values) > 1 and name != "labels" for name, values in fields.items()):
        raise RefusedError("invalid", "an option was given more than once")
    try:
        values = {name: values if name == "labels" else values[0] for name, values in fields.items()}
        return images, kind.model_validate(values)
    except ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: ValidationError) -> RefusedError:
    """The first thing that is wrong, without what was sent."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return RefusedError("bad-request", "the body is not valid JSON")
    where = ".".join(str(part)[:40] for part in first["loc"])
    text = first["msg"]
    if first["type"] in NO_NUMBER:
        text = "takes class numbers; /v1/model has the names" if "labels" in where else "takes a whole number"
    return RefusedError("invalid", f"{where}: {text}" if where else text)


def _too_many(limits: Limits) -> RefusedError:
    return RefusedError("too-large", f"too many images in one request; at most {limits.files} are taken")


def _too_long(number: int, limits: Limits) -> RefusedError:
    message = (
        f"image {number} has too many bytes; at most {limits.file_bytes:,} are taken; compress it, or make it smaller"
    )
    return RefusedError("too-large", message, image=number)
