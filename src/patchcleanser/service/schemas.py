"""Typed requests and answers of the HTTP API; the OpenAPI document and the client are made from them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

TINY_PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAIElEQVR42mPU0NCQlJSUkpKSkpKCM6SkpJgYcIDB"
    "KQEA7CQCpJDd3FUAAAAASUVORK5CYII="
)
"""An image of 8×8 px for the examples."""


class Schema(BaseModel):
    """Unknown fields are refused, so that a misspelt option is not silently ignored."""

    model_config = ConfigDict(extra="forbid")


class Options(Schema):
    """What any request about images may say besides them."""

    masks: int | None = Field(
        None, ge=1, le=64, description="Masks per axis, instead of the service's own number.", examples=[6]
    )
    deadline_ms: int | None = Field(
        None, ge=1, le=3_600_000, description="Give up after so long; the service's own deadline still holds."
    )


class PredictOptions(Options):
    """Options of /v1/predict."""

    details: bool = Field(
        False, description="Also the undefended label, every one-mask label and the second round. One more label."
    )


class CertifyOptions(Options):
    """Options of /v1/certify."""

    labels: list[int] = Field(min_length=1, description="The true class of each image, which must be clean.")
    maps: bool = Field(False, description="Also the map of patch positions that are proved safe.")


Images = Annotated[
    list[Annotated[str, Field(json_schema_extra={"contentEncoding": "base64"})]],
    Field(min_length=1, description="Encoded pictures (PNG, JPEG, …), each in base64."),
]


class PredictBody(PredictOptions):
    """Images to classify, as JSON."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"images": [TINY_PNG]}]})
    images: Images


class CertifyBody(CertifyOptions):
    """Clean images with their true labels, as JSON."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"images": [TINY_PNG], "labels": [0]}]})
    images: Images


class Box(Schema):
    """A rectangle of pixels on the threat's grid."""

    top: int
    left: int
    height: int
    width: int


class Spread(Schema):
    """Softmax confidences of the one-mask labels. High ones prove nothing."""

    lowest: float
    median: float
    highest: float


class Named(Schema):
    """A class."""

    label: int
    name: str | None


class Row(Schema):
    """The second round of one first mask: with each other mask, null where it was not needed."""

    mask: int
    labels: list[int | None]


class Details(Schema):
    """Everything the answer rests on."""

    height: int
    width: int
    undefended: Named
    undefended_confidence: float
    masks: list[list[Box]] = Field(description="What each mask hides.")
    one_mask_labels: list[int]
    one_mask_confidences: list[float]
    second_round: list[Row]


class Recovered(Schema):
    """A defended label. Never a certificate: nobody knows whether this image was clean."""

    kind: Literal["recovery"] = "recovery"
    label: int
    name: str | None
    case: Literal["coarse", "agreed", "disagreer", "majority"] = Field(
        description="All masks of a coarse round agree; all masks agree; one disagreer decided in the second round; "
        "or the majority, unconvinced."
    )
    confidence: Spread
    masks: int = Field(description="How many masks were used.")
    disagreers: list[int] = Field(description="Masks whose label is not the majority's.")
    suspected: list[Box] | None = Field(description="The mask that decided: a patch may lie there.")
    classifications: int
    words: str = Field(description="The same as a sentence.")
    details: Details | None = None


class Detected(Schema):
    """An undefended label, or an alert in its place (Minority Reports)."""

    kind: Literal["detection"] = "detection"
    label: int
    name: str | None
    alert: bool
    confidence: Spread
    masks: int
    reporters: list[int] = Field(description="Masks whose confident label contradicts the undefended one.")
    classifications: int
    words: str
    details: Details | None = None


Prediction = Annotated[Recovered | Detected, Field(discriminator="kind")]


class PredictAnswer(Schema):
    """Predictions in the order of the images."""

    request_id: str
    predictions: list[Prediction]
    milliseconds: float = Field(description="From the first byte of the request to its answer.")


class PositionMap(Schema):
    """Where a patch of one shape is proved harmless."""

    height: int = Field(description="Of the patch.")
    width: int
    rows: list[str] = Field(description="For each top row a string over the left columns: 1 is proved, 0 is not.")


class RecoveryCertificate(Schema):
    """Whether no patch of the threat changes the defended label of this clean image."""

    kind: Literal["recovery"] = "recovery"
    label: int
    name: str | None
    certified: bool = Field(description="Two-mask correctness, the paper's condition.")
    row_certified: bool = Field(description="The weaker condition that proves the same.")
    failing_pair: list[int] | None
    failing_placement: list[Box] | None = Field(description="Patches that the proof does not reach.")
    margin: float | None = Field(description="The smallest top-two logit margin it rests on.")
    unconfirmed: int = Field(
        description="Labels it rests on that were computed in lower precision only. 0: a proof; else it is statistical."
    )
    proved_share: float | None = Field(description="Share of patch positions proved safe, where maps were asked for.")
    maps: list[PositionMap] | None
    masks: int
    classifications: int


class DetectionCertificate(Schema):
    """Whether no patch of the threat changes the label of this clean image unnoticed; a weaker promise."""

    kind: Literal["detection"] = "detection"
    label: int
    name: str | None
    detection_certified: bool
    failing_mask: int | None
    margin: float | None
    masks: int
    classifications: int


Certificate = Annotated[RecoveryCertificate | DetectionCertificate, Field(discriminator="kind")]


class CertifyAnswer(Schema):
    """Certificates in the order of the images."""

    request_id: str
    certificates: list[Certificate]
    milliseconds: float


class MasksAnswer(Schema):
    """The masks for images of one size, proved to cover the threat."""

    height: int
    width: int
    threat: str
    patch_shapes: list[list[int]] = Field(description="Largest patches, each [height, width].")
    masks: list[list[Box]]
    predict_classifications: int = Field(description="For a clean image on which all masks agree.")
    certify_classifications: int
    covered: Literal[True] = Field(description="Checked exactly for every placement; a set that misses one is refused.")


class LimitsAnswer(Schema):
    """What requests must keep to."""

    body_bytes: int
    file_bytes: int
    files: int
    pixels: int
    formats: list[str]
    masks: int
    deadline_seconds: float


class ModelAnswer(Schema):
    """What answers here."""

    version: str
    model: str
    fingerprint: str | None = Field(description="A hash of weights, structure and preprocessing.")
    classes: int | None
    names: list[str] | None
    defense: str
    may_alert: bool
    threat: str
    grid: Literal["source", "input"] = Field(description="Pixels of the image as it came, or of the network's input.")
    masks: list[int] | None = Field(description="Masks per axis [down, across]; null where a stride was given.")
    coarse: int = Field(description="Larger masks per axis that are tried first; 0 for none.")
    may_choose_masks: bool
    device: str
    precision: str
    samples: int
    limits: LimitsAnswer


class SampleInfo(Schema):
    """One of the samples."""

    number: int
    label: int | None
    name: str | None


class SamplesAnswer(Schema):
    """Clean images that come with the service; /v1/samples/0 is the first, a PNG."""

    samples: list[SampleInfo]


class Health(Schema):
    """Whether the process lives, or takes requests."""

    status: Literal["ok"] = "ok"


class ErrorFacts(Schema):
    """What went wrong."""

    code: str = Field(description="Keeps its meaning within /v1; see the documentation.", examples=["too-large"])
    message: str
    request_id: str
    image: int | None = Field(None, description="Which of the images, counted from 0.")


class ErrorAnswer(Schema):
    """Every answer that is not a success."""

    error: ErrorFacts
