"""How options look and are typed: groups in --help, short forms, choices, completion, examples."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args

from typer.models import OptionInfo

import patchcleanser
from patchcleanser.attacks import ATTACKS
from patchcleanser.core.threats import Grid
from patchcleanser.defenses import DEFENSES
from patchcleanser.engine import Confirm, Precision
from patchcleanser.errors import InputError, PatchCleanserError, did_you_mean

GROUPS = {
    "Images and classifier": "task model data images split root labels limit subset seed unreadable teacher models "
    "check batch trust_code",
    "Threat": "patch patches grid masks stride lines image",
    "Defense": "defense coarse option threshold table confirm precision",
    "Attack": "attack iterations locations restarts places loss target sample",
    "Training": "recipe epochs change rate tries greedy mix unmasked sharp features mirror frozen patience",
    "Service": "host port allow_host proxy root_path queue deadline max_pixels max_files",
    "Claim": "method measured_by authors paper code note",
    "Output": "out dry_run as_json title gallery derive png page runs baselines stored listed commands",
    "Where it runs": "device on address workers gpus cpus replicas keep",
}
"""The group of an option in --help, by the name of its parameter."""
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}

SHORT = {"model": "m", "data": "d", "patch": "p", "out": "o", "limit": "n", "batch": "b", "seed": "s"}
SHORT |= {"workers": "w", "config": "c", "quiet": "q"}
"""Short forms, by the name of the parameter."""

HABITS = {"batch-size": "batch", "output": "out", "num-workers": "workers", "threat": "patch"}
"""Names that other tools have taught: accepted, but not in --help."""

CHOICES: dict[str, Iterable[str]] = {
    "attack": ATTACKS,
    "confirm": get_args(Confirm),
    "defense": DEFENSES,
    "grid": get_args(Grid),
    "labels": ("auto", "name", "number"),
    "loss": ("margin", "ce", "dlr"),
    "on": ("here", "ray"),
    "places": ("random", "searched"),
    "precision": get_args(Precision),
    "task": ("classify", "multilabel", "detect"),
    "subset": ("random", "first", "authors"),
    "unreadable": ("stop", "skip"),
}
"""All values of an option, by the name of the parameter."""
RANGES = {"seed": (0, 2**32 - 1), "port": (0, 65535)}
"""The least and the greatest number of an option, by the name of the parameter."""
SWEPT = "defense"
"""The option of these that also takes a comma list."""

EXAMPLES = {
    "demo": ("demo", "demo --limit 30 --out demo-small"),
    "certify": ("certify -m zoo:tiny -d sample -p 5 -n 50 -o runs/first", "certify -p 2%,4% --masks 4,6 --dry-run"),
    "report": ("report runs/first", "report runs/sweep --out page --title 'Our sweep'"),
    "audit": ("audit runs/first", "audit runs/first --sample 100 --attack 0"),
    "attack": ("attack -p 5 --attack apgd -n 20", "attack -p 5 --attack adaptive --locations 4 -n 20 -o runs/adaptive"),
    "predict": ("predict photo.jpg -m zoo:tiny -p 2%", "predict photos --defense minority-reports --json"),
    "price": ("price -m zoo:tiny -p 5", "price -m timm:resnet50 -d folder:photos -p 2% --masks 4,6 -n 100 --json"),
    "serve": ("serve -m zoo:tiny -p 2%", "serve -m trained:runs/net --host 0.0.0.0 --port 8080"),
    "masks": ("masks -p 32 --image 224", "masks -p 2% --image 480x640 --masks 6x4 --png masks.png"),
    "data": ("data", "data folder:photos --check"),
    "models": ("models", "models zoo:tiny"),
    "train": (
        "train -m net:resnet -d cifar10 -o runs/resnet",
        "train -m 'timm:resnet18?num_classes=10&size=32' -d folder:photos -o runs/own",
    ),
    "harden": (
        "harden -m torchvision:mobilenet_v2 --images photos -o runs/hard",
        "harden -m zoo:tiny --images cifar10 --epochs 5 -o runs/hard",
    ),
    "claim": (
        "claim leaderboard/rows/mine --by 'A. Author'",
        "claim leaderboard/rows/mine --method 'Ours, ViT-B' -o claim.json",
    ),
    "reproduce": ("reproduce --list", "reproduce table2 --models zoo:tiny -d cifar10 -n 100"),
}
"""Two calls of each command."""


def epilog(command: str) -> str:
    """What stands below the options of a command."""
    return "\n\n".join(["Examples:", *(f"  patchcleanser {example}" for example in EXAMPLES[command])])


def option_name(typed: str) -> str:
    """The name of an option as we spell it, without dashes.

    >>> option_name("batch_size"), option_name("masks")
    ('batch', 'masks')
    """
    return HABITS.get(dashed(typed), dashed(typed))


def dashed(name: str) -> str:
    """A name with dashes between its words."""
    return name.replace("_", "-")


def group_order(parameter: Parameter) -> int:
    """Where --help shows an option: groups in their order, after those that have none."""
    return [None, *GROUPS].index(GROUP_OF.get(parameter.name))


def presented(parameter: Parameter) -> Parameter:
    """An option with its group, short form and completion."""
    information, name = next(iter(getattr(parameter.annotation, "__metadata__", ())), None), parameter.name
    if information is None:
        return parameter
    information = copy.copy(information)  # several commands share an option
    if isinstance(information, OptionInfo):
        information.rich_help_panel = GROUP_OF.get(name)
    kinds = [kind for kind in (int, float) if parameter.annotation.__origin__ in (kind, kind | None)]
    if kinds and isinstance(information, OptionInfo) and information.min is None:
        information.parser = number_parser(f"--{name.replace('_', '-')}", kinds[0], RANGES.get(name))
    if name in CHOICES or name in ("model", "data"):
        information.autocompletion = lambda incomplete: completions(name, incomplete)
    if name in SHORT:
        # The first flag that typer.Option was given sits in `default`; without any, flags are derived from the name.
        flags = () if information.default is not ... else (f"--{name.replace('_', '-')}",)
        information.param_decls = (*flags, *(information.param_decls or ()), f"-{SHORT[name]}")
    return parameter.replace(annotation=Annotated[parameter.annotation.__origin__, information])


def number_parser(
    option: str, kind: type[int | float], limits: tuple[int, int] | None = None
) -> Callable[[Any], int | float]:
    """Reads a number of this kind, in these limits. Its error is no ValueError: Typer has its own words for those."""

    def parse(text: Any) -> int | float:
        try:
            number = kind(text)
        except ValueError as error:
            noun = "whole number" if kind is int else "number"
            raise PatchCleanserError(f"{option} takes a {noun}, got {text!r}") from error
        if limits and not limits[0] <= number <= limits[1]:
            raise PatchCleanserError(f"{option} is a number from {limits[0]} to {limits[1]}, got {number}")
        return number

    parse.__name__ = kind.__name__
    return parse


def completions(name: str, start: str) -> list[str]:
    """The values of an option that begin with what was typed, found without torch."""
    values: Iterable[str] = CHOICES.get(name, ())
    if name == "model":
        values = [*(f"zoo:{model}" for model in zoo_models()), "timm:", "torchvision:", "trained:", "onnx:", "python:"]
    elif name == "data":
        from patchcleanser.data.catalog import DATASETS

        values = [dataset.removesuffix("PATH") for dataset in DATASETS]
    return [value for value in values if value.startswith(start)]


def zoo_models() -> list[str]:
    """Names of the zoo models at hand, as `classifiers.trained.zoo_folders` finds them."""
    package = Path(patchcleanser.__file__).parent
    roots = [Path("zoo"), package / "zoo", package.parents[1] / "zoo", Path(os.environ.get("PATCHCLEANSER_ZOO", "zoo"))]
    return sorted({card.parent.name for root in roots for card in root.glob("*/card.json")})


def require_choices(options: dict[str, Any]) -> None:
    """InputError for a value that an option does not have, with the nearest that it has."""
    for name in CHOICES.keys() & options.keys():
        value, choices = options[name], list(CHOICES[name])
        for part in value.split(",") if name == SWEPT and value else [value]:
            if isinstance(part, str) and part not in choices:
                listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise InputError(f"--{name} is {listed}, got {part!r}{did_you_mean(part, choices)}")
