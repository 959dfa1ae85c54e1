"""DefenseClaim: what somebody says a defense achieves, as one file of the leaderboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from patchcleanser.core.threats import AnyRectangle, Rectangle, Threat
from patchcleanser.defenses import DEFENSES
from patchcleanser.errors import PatchCleanserError, RecordError, did_you_mean
from patchcleanser.records.atomic import whole_file

CHOICES = {
    "promise": ("recovery", "detection"),
    "grid": ("source", "input", None),
    "labels": ("exact", "fast", None),
}
"""The values of fields that have few."""
OURS = "this repository"
"""Who measured the claims of this repository."""
PERCENTAGES = ("undefended", "clean", "certified")
TYPES = {str: "text", int: "a whole number", float: "a number", NoneType: "null"}
"""What the types of JSON are called in messages."""


@dataclass(frozen=True)
class DefenseClaim:
    """One claim. Shares are in percent; what is not known is None, and is left out of the file."""

    method: str
    """Defense and classifier, as the table shows them."""
    promise: str
    """recovery: the label is kept. detection, which is weaker: it is kept, or an alert fires."""
    data: str
    patch: str
    """As on the command line: 5x5, 2%, any:1%."""
    certified: float
    """Share of the images with a certificate of this promise."""
    measured_by: str
    authors: str | None = None
    """Of the paper, with the venue."""
    paper: str | None = None
    """Its title."""
    where: str | None = None
    """The table or figure that prints the numbers."""
    code: str | None = None
    """Where the code is."""
    side: int | None = None
    at: int | None = None
    """Side of a square patch in px, on a square image of side `at`."""
    count: int = 1
    """Patches at once."""
    grid: str | None = None
    """Pixels that the patch is on: source (of the image) or input (of the network)."""
    masks: str | None = None
    defense: str | None = None
    """Its name on our command line."""
    options: str | None = None
    """Options of the defense, as threshold=0.5."""
    labels: str | None = None
    """exact: in float32. fast: certificates rest on labels of lower precision, and are statistical."""
    images: int | None = None
    undefended: float | None = None
    clean: float | None = None
    """Accuracy of the defended classifier on clean images; an alert counts as wrong."""
    classifications: float | None = None
    """For each image, answer and certificate together."""
    milliseconds: float | None = None
    """For each image, on `hardware`."""
    hardware: str | None = None
    run: str | None = None
    """The folder of the run, from the root of the repository."""
    run_key: str | None = None
    """Hash of the run's job: weights, images, threat, masks, defense."""
    run_digest: str | None = None
    """Hash of all its rows."""
    table: str | None = None
    """FILE#POINTER of an entry with these numbers, where the rows are not in the repository."""
    audit_key: str | None = None
    """The signature of the run's audit."""
    rederived: int | None = None
    """Rows that the audit derived again from model and images."""
    attack: str | None = None
    attacked: int | None = None
    """Images that were attacked."""
    fooled: int | None = None
    """Certified images that the attack fooled."""
    attack_table: str | None = None
    """FILE#POINTER of the attack, if the audit did not run it."""
    note: str | None = None

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise RecordError(problem)

    def _problems(self) -> Iterator[str]:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                yield f"{name} is {' or '.join(str(choice) for choice in choices if choice)}, got {getattr(self, name)}"
        for name in PERCENTAGES:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 100:
                yield f"{name} is a percentage from 0 to 100, got {value}"
        if self.clean is not None and self.certified > self.clean:
            yield f"certified is at most clean ({self.clean}), since certified answers are right; got {self.certified}"
        if self.defense is not None and self.defense not in DEFENSES:
            yield str(RecordError.unknown("defense", self.defense, DEFENSES))
        if self.run and self.table:
            yield "a claim names a run or a table, got both; leave out the table"
        if self.run and not (self.run_key and self.run_digest):
            yield "run needs run_key and run_digest; make the claim with: patchcleanser claim RUN"
        if not self.run and (self.run_key or self.run_digest):
            yield "run_key and run_digest are hashes of a run, got no run; leave them out"
        if not (self.run or self.table or self.paper):
            yield "a claim names its run, table or paper, got none of them; make it with: patchcleanser claim RUN"
        if self.audit_key and not self.run:
            yield "audit_key names the audit of a run, got no run; leave it out"
        if self.rederived is not None and not self.audit_key:
            yield f"rederived needs its record, audit_key; got none for {self.rederived}"
        if (self.attacked, self.fooled) != (None, None) and not (self.audit_key or self.attack_table):
            yield "attacked and fooled need their record, audit_key or attack_table; got none"
        if self.milliseconds is not None and not self.hardware:
            yield f"milliseconds need their hardware, got none for {self.milliseconds}"
        if self.code is not None and not re.fullmatch(r"https://[\w./~-]+", self.code):
            yield f"code is an address, https://…, got {self.code}"
        try:
            yield from self._problems_of_side()
        except PatchCleanserError as error:
            yield str(error)

    def _problems_of_side(self) -> Iterator[str]:
        """Whether `side` is what the patch takes on an image of side `at`; papers round shares up or down."""
        threat = self.threat
        if self.side is None or self.at is None:
            if self.side != self.at:
                yield f"side and at go together, got {self.side} and {self.at}; give both, or none"
            return
        slack = int(self.standing == "reported" and "%" in self.patch)
        for height, width in threat.shapes((self.at, self.at))[:1]:
            if height != width or abs(height - self.side) > slack:
                yield f"side is {self.side}, but {self.patch} of {self.at}x{self.at} px is {height}x{width}; write it"

    @classmethod
    def from_dict(cls, content: Any) -> DefenseClaim:
        """The claim in plain values; RecordError if they are not of this schema."""
        if not isinstance(content, dict):
            raise RecordError(f"a claim is a JSON object, got {type(content).__name__}")
        hints = get_type_hints(cls)
        for name, value in content.items():
            if name not in hints:
                raise RecordError(f"no field {name!r}{did_you_mean(name, hints)}; leaderboard/README.md lists them")
            types = get_args(hints[name]) or (hints[name],)
            if type(value) not in types and not (type(value) is int and float in types):
                expected = " or ".join(TYPES[kind] for kind in types)
                raise RecordError(f"{name} is {expected}, got {json.dumps(value, ensure_ascii=False)}")
        for field in fields(cls):
            if field.default is MISSING and field.name not in content:
                raise RecordError(f"the field {field.name!r} is missing; add it")
        return cls(**content)

    @classmethod
    def read(cls, path: Path) -> DefenseClaim:
        """The claim in a file."""
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise RecordError(f"{path.name} is no readable JSON ({error})") from error
        except RecordError as error:
            raise RecordError(f"{path.name}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without those that are not known."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def write(self, path: Path) -> None:
        with whole_file(path) as part:
            part.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @property
    def standing(self) -> str:
        """What the numbers rest on: re-derived from rows, measured by us without rows, or reported by a paper."""
        return "re-derived" if self.run else "measured" if self.table else "reported"

    @property
    def theorem(self) -> str | None:
        """The theorem that Coq has checked of the certificate."""
        if "coarse=" in (self.options or ""):
            return "a_coarse_certified_image_keeps_its_label"
        return DEFENSES[self.defense].theorem if self.defense else None

    @cached_property
    def threat(self) -> Threat:
        return Threat.parse(self.patch, count=self.count, grid="input" if self.grid == "input" else "source")

    @property
    def kind_of_threat(self) -> str:
        """Number and shape of the patches."""
        shape = self.threat.shape
        square = not isinstance(shape, Rectangle) or shape.height == shape.width
        noun = "any rectangle of the area" if isinstance(shape, AnyRectangle) else "square" if square else "rectangle"
        if self.count > 1:
            return f"{self.count} patches, each {'' if noun.startswith('any') else 'a '}{noun}"
        return noun if noun.startswith("any") else f"one {noun}"

    @property
    def size_of_patch(self) -> str:
        """The same text for equal patches, however they were written."""
        if self.side and self.at:
            return f"{self.side}×{self.side} of {self.at}×{self.at} px"
        share = str(self.threat.shape).removeprefix("any:").replace("x", "×")
        return f"up to {share}" if isinstance(self.threat.shape, AnyRectangle) else share

    @property
    def citation(self) -> str:
        """Authors and venue, and where in the paper the numbers are."""
        return f"{self.authors} ({self.where})" if self.where else str(self.authors)

    @property
    def file_name(self) -> str:
        """A name for its file, after method, data, threat and masks."""
        parts = (self.method, self.data, f"{self.count}x" if self.count > 1 else "", self.patch.replace("%", "pct"))
        text = "-".join(filter(None, (*parts, self.grid, self.masks, self.options))).lower()
        return re.sub(r"[^a-z0-9.]+", "-", text).strip("-.") + ".json"
