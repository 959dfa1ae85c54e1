"""patchcleanser price: what predictions and certificates cost with different settings, and what they give."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from patchcleanser.cli.options import AsJson, ImageOptions, Limit
from patchcleanser.cli.progress import progress
from patchcleanser.core.counts import counted
from patchcleanser.engine import Precision
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.evaluation.prices import Price

HEADER = (
    f"{'':18} {'masks':>6} {'coarse':>6} {'precision':>9} {'a prediction':>21} {'a certificate':>21} {'clean':>7} "
    f"{'certified':>10}"
)


@dataclass(frozen=True)
class PriceOptions(ImageOptions):
    """The settings that are compared, and the images."""

    masks: Annotated[str, typer.Option(help="Masks per axis that are compared, as 3,4,5,6.")] = "3,4,5,6"
    coarse: Annotated[int, typer.Option(help="Larger masks per axis to try first, compared with none. 0 is none.")] = 3
    precision: Annotated[str, typer.Option(help="exact, or fast, which compares fast and exact labels.")] = "exact"
    limit: Limit = 20

    @property
    def settings(self) -> list[tuple[int, int]]:
        """Every number of masks per axis, without coarse masks and with them."""
        try:
            numbers = [int(text) for text in self.masks.split(",")]
        except ValueError as error:
            raise InputError(f"--masks is a comma list of masks per axis, as 3,4,5,6; got {self.masks!r}") from error
        return [(masks, coarse) for masks in numbers for coarse in dict.fromkeys((0, self.coarse)) if coarse < masks]


def price(options: PriceOptions, as_json: AsJson = False) -> None:
    """Compare recovery defenses with different settings: cost, time, clean and certified accuracy.

    Each setting predicts and certifies the same labelled images; one-pass is compared if the model is a network for it.

    Times are of this device, and swing with what else it does.
    """
    from patchcleanser.evaluation.prices import price_jobs, prices

    classifier = options.loader(device=options.device)
    dataset = options.images(classifier)
    precisions = get_args(Precision) if options.precision == "fast" else ("exact",)
    jobs = price_jobs(classifier, dataset, options.threat, settings=options.settings, precisions=precisions)
    measured: list[Price] = []
    total = sum(map(len, jobs))
    with progress("settings") as show:
        show(0, total, "")
        for row in prices(jobs):
            measured.append(row)
            show(len(measured), total, "")
    if as_json:
        print(json.dumps([_to_json(row) for row in measured], indent=1))
        return
    print(
        f"{options.model} on {classifier.device}, {options.threat}, {counted(len(dataset), 'image')} of {options.data}"
        "\nwhat an image costs: classifications, and their time"
    )
    print("\n".join([HEADER, *_lines(measured)]))
    if any(row.statistical for row in measured):
        print("certificates by --precision fast are statistical, no proofs: they rest on labels of lower precision")


def _to_json(row: Price) -> dict[str, Any]:
    return {**asdict(row), "clean": row.clean.to_dict(), "certified": row.certified.to_dict()}


def _lines(rows: Iterable[Price]) -> list[str]:
    """A line for each setting."""
    lines = []
    for row in rows:
        prediction = f"{row.prediction_labels:.1f} in {row.prediction_ms:6.1f} ms"
        certificate = f"{row.certificate_labels:.0f} in {row.certificate_ms:6.0f} ms"
        coarse = f"{row.coarse}×{row.coarse}" if row.coarse else "none"
        setting = f"{row.defense:18} {f'{row.masks}×{row.masks}':>6} {coarse:>6} {row.precision:>9}"
        given = f"{row.clean.percent:6.1f}% {row.certified.percent:9.1f}%"
        lines.append(f"{setting} {prediction:>21} {certificate:>21} {given}")
    return lines
