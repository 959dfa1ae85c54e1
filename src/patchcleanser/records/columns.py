"""The columns of rows by the kind of run. Each kind also has shares (metrics.py) and contradictions (shards.py)."""

from __future__ import annotations

import pyarrow as pa

BOUNDS = ("undefended", "clean", "certified", "one_mask", "each_class")
"""Whose true and false positives a row of several labels counts; see MultiLabelExamination.counts."""
_LABELLED = [
    ("index", pa.int64()),  # position among the images of the run
    ("id", pa.string()),
    ("label", pa.int32()),
    ("skipped", pa.string()),  # why there is no answer; null where there is one
    ("height", pa.int32()),  # on the threat's grid
    ("width", pa.int32()),
]
_IMAGE = [column for column in _LABELLED if column[0] != "label"]
SCHEMA = pa.schema(
    [
        *_LABELLED,
        ("undefended", pa.int32()),
        ("one_mask_labels", pa.list_(pa.int32())),
        ("one_mask_margins", pa.list_(pa.float32())),
        ("one_mask_confidences", pa.list_(pa.float32())),
        ("coarse_labels", pa.list_(pa.int32())),  # one-mask labels of the coarse masks; null without --coarse
        ("table", pa.list_(pa.int32())),  # labels by union of two masks; null without --table
        ("answer", pa.int32()),
        ("case", pa.string()),
        ("deciding_mask", pa.int32()),
        ("alert", pa.bool_()),  # detection only
        ("certified", pa.bool_()),
        ("row_certified", pa.bool_()),
        ("detection_certified", pa.bool_()),  # a weaker guarantee, and so a column of its own
        ("failing_pair", pa.list_(pa.int32())),  # two masks under which the label is wrong
        ("weakest", pa.list_(pa.int32())),  # top, left, height, width of each patch that the proof does not cover
        ("margin", pa.float32()),
        ("classifications", pa.int32()),
        ("rechecked", pa.int32()),  # fast labels computed again in float32
        ("flipped", pa.int32()),  # of those, the ones that were wrong
        ("audited", pa.int32()),  # random labels that were not uncertain, computed both ways
        ("caught", pa.int32()),  # of those, the ones that were wrong; then the whole batch was computed in float32
        ("unconfirmed", pa.int32()),  # labels computed in lower precision only; 0: the certificate is a proof
        ("seconds", pa.float32()),
    ]
)
ATTACK_SCHEMA = pa.schema(
    [
        *_LABELLED,
        ("undefended", pa.int32()),  # of the clean image, as are the next ones
        ("answer", pa.int32()),
        ("alert", pa.bool_()),
        ("certified", pa.bool_()),
        ("row_certified", pa.bool_()),
        ("detection_certified", pa.bool_()),
        ("undefended_fooled", pa.bool_()),  # wrong on the clean image, or at some location
        ("fooled", pa.bool_()),  # the defense answers wrongly, without an alert
        ("attacked_undefended", pa.int32()),  # of the worst attacked image, as are the next ones
        ("attacked_answer", pa.int32()),
        ("attacked_alert", pa.bool_()),
        ("attacked_case", pa.string()),
        ("patches", pa.list_(pa.int32())),  # top, left, height, width of each
        ("margin", pa.float32()),  # how far the undefended classifier is from being fooled; below 0 it is
        ("queries", pa.int64()),  # classifications by the attacker, at all locations and restarts
        ("seconds", pa.float32()),
    ]
)
_SHARES = pa.list_(pa.float64())
OBJECT_SCHEMA = pa.schema(
    [
        *_IMAGE,
        ("classes", pa.list_(pa.int32())),  # of the objects, by the detector's numbers
        ("boxes", _SHARES),  # left, top, right, bottom of each object
        ("undefended", _SHARES),  # the share of each object that a box of its class covers; here without the defense
        ("defended", _SHARES),
        ("over", _SHARES),  # the share promised wherever over the object a patch is; NaN without a placement
        ("near", _SHARES),
        ("far", _SHARES),
        ("promises", _SHARES),  # the share that the detections under each mask promise, object by object
        ("undefended_boxes", pa.int32()),
        ("undefended_matched", pa.int32()),  # boxes that lie on an object of their class
        ("defended_boxes", pa.int32()),
        ("defended_matched", pa.int32()),
        ("classifications", pa.int32()),  # images that the detector was given
        ("seconds", pa.float32()),
    ]
)
_SCORES, _COUNTS = pa.list_(pa.float32()), pa.list_(pa.int32())
MULTILABEL_SCHEMA = pa.schema(
    [
        *_IMAGE,
        ("classes", _COUNTS),  # the true ones, by number
        ("undefended_scores", _SCORES),  # of each class, without masks
        ("clean_scores", _SCORES),  # what the defense compares with thresholds
        ("lowest_scores", _SCORES),  # between which bounds any attacked image has them
        ("highest_scores", _SCORES),
        ("unproved", _COUNTS),  # mask × classes + class, where a row of two-mask decisions is not right throughout
        # True and false positives at each threshold, the job's own first; without and with the defense, and at least
        # or at most under attack: at the worst place, by each mask alone, and of each class at its own worst place.
        *((f"{bound}_{what}", _COUNTS) for bound in BOUNDS for what in ("true", "false")),
        ("weakest", _COUNTS),  # top, left, height, width of each patch, where most classes are not proved right
        ("margin", pa.float32()),
        ("classifications", pa.int32()),
        ("seconds", pa.float32()),
    ]
)
_FLAGS = pa.list_(pa.bool_())
CLASS_ATTACK_SCHEMA = pa.schema(
    [
        *_IMAGE,
        ("classes", _COUNTS),  # the true ones, by number
        ("attacked", _COUNTS),  # each class that was attacked, with a patch of its own; the next ones are for each
        ("certified", _FLAGS),
        ("undefended_wrong", _FLAGS),
        ("defended_wrong", _FLAGS),
        ("true_positives", _COUNTS),  # of all classes of the attacked image, with the defense
        ("false_positives", _COUNTS),
        ("promised_true", pa.int32()),  # at least
        ("promised_false", pa.int32()),  # at most
        ("classifications", pa.int64()),  # by the attacker
        ("seconds", pa.float32()),
    ]
)
SCHEMAS = {
    "certify": SCHEMA,
    "attack": ATTACK_SCHEMA,
    "detect": OBJECT_SCHEMA,
    "multilabel": MULTILABEL_SCHEMA,
    "multilabel-attack": CLASS_ATTACK_SCHEMA,
}
"""The columns of each kind of run; a job that names no kind certifies."""

_SHARED = ("label", "skipped", "undefended", "answer", "alert", "certified", "row_certified", "detection_certified")
_COST = ("classifications", "seconds")
COLUMNS = (*_SHARED, "case", "margin", *_COST)
"""The columns that a summary of certified images needs."""
COLUMNS_OF = {
    "certify": COLUMNS,
    "attack": (
        *(*_SHARED, "undefended_fooled", "fooled", "attacked_answer", "attacked_alert", "attacked_case", "queries"),
        "seconds",
    ),
    "detect": ("skipped", "undefended", "defended", "over", "near", "far", *_COST),
    "multilabel": (
        *("skipped", "classes", *_COST),
        *(f"{bound}_{what}" for bound in BOUNDS for what in ("true", "false")),
    ),
    "multilabel-attack": (
        *("skipped", "attacked", "certified", "undefended_wrong", "defended_wrong", "true_positives"),
        *("false_positives", "promised_true", "promised_false", *_COST),
    ),
}
"""The columns that a summary needs, by the kind of run."""

_MARKS = {
    "multilabel-attack": "attacked",
    "multilabel": "each_class_true",
    "detect": "defended",
    "attack": "fooled",
}
"""Columns of a summary that only one kind of run has."""


def kind_of(rows: pa.Table) -> str:
    """The kind of run that rows are from, by their columns."""
    return next((kind for kind, mark in _MARKS.items() if mark in rows.column_names), "certify")
