"""A run on disk: one row per image, in Parquet shards beside a manifest that says what produced them.

    RUN/manifest.json          the job, its key, number of images, images per batch, a checksum of these
    RUN/rows-00000.parquet     the rows of the first batch with their checksum, and so on
    RUN/lock                   held by the process that is writing

A shard is named by its batch and written completely or not at all. So a batch is done if its shard exists, a killed
run loses at most the batch in flight, and writing a batch again writes the same rows. Rows are checked whenever they
are read: a missing shard is not done yet, and a shard that is not as it was written is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
from filelock import FileLock, Timeout

from patchcleanser.core.counts import counted
from patchcleanser.core.geometry import Size
from patchcleanser.core.hiding import object_masks
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.receptive_fields import ReceptiveFields
from patchcleanser.core.threats import Threat
from patchcleanser.errors import DataError, MissingDependencyError, RecordError
from patchcleanser.records.leftovers import batch_of_shards, require_free, require_no_links
from patchcleanser.records.metrics import BOUNDS, COLUMNS_OF, Summary, error_rate_bound, summary
from patchcleanser.records.provenance import MANIFEST, key_of, read_manifest, short, write_manifest
from patchcleanser.records.shards import DamageError, check_shard, read_shard, type_name, write_shard

_IMAGE = [
    ("index", pa.int64()),  # position among the images of the run
    ("id", pa.string()),
    ("label", pa.int32()),
    ("skipped", pa.string()),  # why there is no answer; null where there is one
    ("height", pa.int32()),  # on the threat's grid
    ("width", pa.int32()),
]
SCHEMA = pa.schema(
    [
        *_IMAGE,
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
        *_IMAGE,
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
        *(column for column in _IMAGE if column[0] != "label"),
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
        *(column for column in _IMAGE if column[0] != "label"),
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
        *(column for column in _IMAGE if column[0] != "label"),
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

NEWER_COLUMNS = ("caught", "unconfirmed", "coarse_labels")
"""Columns that older rows do not have."""

TIMES = ("seconds",)
"""Columns that may differ between two runs of one job."""

Row = dict[str, Any]
Stamp = tuple[int, ...]
"""Identifies a file and its content: inode, size, time of the last write."""


@dataclass(frozen=True)
class Run:
    """A run folder. `job` decides the rows; `metadata` (command, versions, class names, …) does not."""

    folder: Path
    job: dict[str, Any]
    images: int
    batch: int
    metadata: dict[str, Any]
    checked: bool = True
    """Whether manifest and rows have checksums; those of older versions do not."""
    _checksums: dict[int, tuple[Stamp, str]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By batch, for shards that were checked: which file it was, and its checksum."""

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {self.kind}, {self.threat}, {counted(self.images, 'image')}>"

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open the run in this folder."""
        content = read_manifest(Path(folder))
        if content["job"].get("kind", "certify") not in SCHEMAS:
            raise RecordError(
                f"{folder} holds a run of kind {content['job']['kind']!r}; there are {', '.join(SCHEMAS)}"
            )
        facts = {name: content[name] for name in ("job", "images", "batch")}
        return cls(Path(folder), **facts, metadata=content["about"], checked="checksum" in content)

    @classmethod
    def begin(
        cls, folder: str | Path, job: Mapping[str, Any], *, images: int, batch: int, metadata: Mapping[str, Any]
    ) -> Run:
        """Open the run of this job in this folder, or create it.

        An existing run keeps its batch size, since batches name the shards. If only its manifest
        is lost, the shards say which job and which batches they belong to. A folder of other files is refused.
        """
        folder = Path(folder)
        if (folder / MANIFEST).exists():
            run = cls.open(folder)
            differs = [name for name in sorted({*run.job, *job}) if run.job.get(name) != job.get(name)]
            if differs:
                changes = ", ".join(f"{n} ({short(run.job.get(n))}, now {short(job.get(n))})" for n in differs)
                hint = " (other images: --data, --limit, --seed or --subset)" if "data" in differs else ""
                raise RecordError(
                    f"{folder} holds a run of another job; it differs in {changes}{hint}; use another --out"
                )
            return run
        require_no_links([folder / MANIFEST])
        require_free(folder)
        run = cls(folder, dict(job), images, batch_of_shards(folder, job, images) or batch, dict(metadata))
        columns = {column.name: type_name(column.type) for column in run.schema}
        write_manifest(folder, {"job": job, "images": images, "batch": run.batch, "columns": columns}, metadata)
        return run

    @property
    def key(self) -> str:
        """Hash of the job."""
        return key_of(self.job)

    @property
    def kind(self) -> str:
        """What was done, by the names of SCHEMAS."""
        return str(self.job.get("kind", "certify"))

    @property
    def schema(self) -> pa.Schema:
        return SCHEMAS[self.kind]

    @cached_property
    def threat(self) -> Threat:
        return Threat.from_json(self.job["threat"])

    def mask_set(self, size: Size) -> MaskSet:
        """The masks of this run for images of this size on the threat's grid."""
        masks, stride = (tuple(v) if v else None for v in (self.job["masks"], self.job["stride"]))
        if self.kind == "detect":
            return object_masks(self.threat, size, masks=masks, stride=stride, lines=self.job["lines"])
        field = self.job.get("receptive_field")
        fields = ReceptiveFields.fields(size, *field) if field else None
        return MaskSet.build(self.threat, image=size, masks=masks, stride=stride, fields=fields)

    @property
    def coarse(self) -> int:
        """Coarse masks per axis that were tried first; 0 for none."""
        return int(self.job["options"].get("coarse", 0))

    def coarse_mask_set(self, size: Size) -> MaskSet | None:
        """The coarse masks of this run for images of this size."""
        return MaskSet.build(self.threat, image=size, masks=self.coarse) if self.coarse else None

    @property
    def batches(self) -> int:
        """Number of batches, done or not."""
        return -(-self.images // self.batch)

    def indices(self, batch: int) -> range:
        return range(batch * self.batch, min((batch + 1) * self.batch, self.images))

    def shard(self, batch: int) -> Path:
        """Path of the rows of a batch."""
        return self.folder / f"rows-{batch:05d}.parquet"

    def missing(self) -> list[int]:
        return [batch for batch in range(self.batches) if not self.shard(batch).is_file()]

    @property
    def finished(self) -> bool:
        return not self.missing()

    @property
    def statistical(self) -> str:
        """A sentence on certificates that rest on labels of lower precision; empty if there are none."""
        if self.job.get("precision", "exact") != "fast":
            return ""
        wanted = ("row_certified", "audited", "caught", "unconfirmed")
        rows = self.read([name for name in wanted if name in self.schema.names]).to_pylist()
        # Rows of older runs and of attacks do not count such labels: all of them may be.
        unproved = [row for row in rows if row["row_certified"] is not None and row.get("unconfirmed") != 0]
        number = sum(1 for row in unproved if row["row_certified"])
        audited, caught = (sum(row.get(name) or 0 for row in rows) for name in ("audited", "caught"))
        bound = ""
        if audited:
            rate = error_rate_bound(caught, audited)
            bound = f"; with 95% confidence at most {rate:.2%} of these are wrong ({audited:,} audited)"
        if number:
            text = "certificate is statistical, no proof: it rests"
            text = text if number == 1 else "certificates are statistical, not proofs: they rest"
            text = f"{number:,} {text} on labels of lower precision{bound}"
            return f"{text}; use --confirm all for proofs" if self.kind == "certify" else text
        if unproved and self.job.get("table"):
            return f"tables of images that are not certified hold labels of lower precision{bound}"
        return ""

    @property
    def unchecked(self) -> str | None:
        """A sentence on rows without checksums; None if they have them."""
        if self.checked:
            return None
        return (
            f"{self.folder} was made before rows had checksums: they are unchecked, and a change that does not "
            "contradict itself would not be noticed"
        )

    @property
    def digest(self) -> str | None:
        """One hash of all rows and their headers, to be published with a result; None until the run is finished."""
        if not self.finished:
            return None
        return key_of([self._checked_shard(batch)[1] for batch in range(self.batches)])

    @property
    def integrity(self) -> dict[str, str | None]:
        """Digest and caveats, as plain values."""
        return {"digest": self.digest, "unchecked": self.unchecked, "statistical": self.statistical or None}

    def header(self, batch: int) -> dict[str, Any]:
        """The header of a batch's shard: where its rows belong."""
        indices = [self.indices(batch).start, self.indices(batch).stop]
        return {"key": self.key, "images": self.images, "batch": self.batch, "indices": indices}

    def write(self, batch: int, rows: Sequence[Row]) -> None:
        """Write the rows of one batch, completely or not at all."""
        table = pa.Table.from_pylist(list(rows), schema=self.schema)
        path, header = self.shard(batch), self.header(batch)
        try:
            checksum = check_shard(table, header, self.schema.names, needs_checksum=False)
        except DamageError as error:
            raise RecordError(f"rows that cannot be right; {path} is not written: it {error}") from error
        write_shard(path, table, header, checksum)
        self._checksums[batch] = _stamp(path), checksum

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of all batches that are done, checked, in the order of the images."""
        parts, damaged = [], []
        for batch in self._present():
            try:
                parts.append(self.read_batch(batch, columns))
            except RecordError as error:
                damaged.append((batch, error))
        if damaged:
            more = ", ".join(self.shard(batch).name for batch, _ in damaged[1:])
            raise RecordError(f"{damaged[0][1]}" + (f"; the same goes for {more}" if more else ""))
        if parts:
            return pa.concat_tables(parts)
        return self.schema.empty_table().select(self.schema.names if columns is None else list(columns))

    def summary(self) -> Summary:
        """Accuracies of the images done so far, each with its 95% interval."""
        return summary(self.read(COLUMNS_OF[self.kind]))

    def to_pandas(self, columns: Sequence[str] | None = None) -> Any:
        """The rows as a pandas DataFrame."""
        try:
            import_module("pandas")
        except ImportError as error:
            raise MissingDependencyError("pandas is not installed; run: pip install pandas") from error
        return self.read(columns).to_pandas()

    def read_batch(self, batch: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of one batch, checked."""
        table = self._checked_shard(batch)[0]
        if table is None:
            table = read_shard(self.shard(batch), self.schema, columns)
        for name in NEWER_COLUMNS:
            if name in self.schema.names and name not in table.column_names:
                column = self.schema.field(name)
                table = table.append_column(column, pa.nulls(len(table), column.type))
        names = [name for name in self.schema.names if name in table.column_names]
        return table.select(names if columns is None else list(columns)).replace_schema_metadata(None)

    def _checked_shard(self, batch: int) -> tuple[pa.Table | None, str]:
        """The rows of a shard (None if this very file was checked before) and their checksum; checks them."""
        path = self.shard(batch)
        try:
            stamp, (last_stamp, last_checksum) = _stamp(path), self._checksums.get(batch, (None, ""))
            if last_stamp == stamp:
                return None, last_checksum
            table = read_shard(path, self.schema)
            required = [name for name in self.schema.names if name not in NEWER_COLUMNS]
            checksum = check_shard(table, self.header(batch), required, needs_checksum=self.checked)
        except DamageError as error:
            rows = len(self.indices(batch))
            raise RecordError(
                f"{path} {error}; delete it and run the same command again to compute its {rows} rows anew"
            ) from error
        self._checksums[batch] = stamp, checksum
        return table, checksum

    def _present(self) -> list[int]:
        """The batches that are done; RecordError if a shard has a number beyond the last batch."""
        for path in self.folder.glob("rows-*.parquet"):
            number = re.fullmatch(r"rows-(\d{5,})\.parquet", path.name)
            if number is not None and int(number[1]) >= self.batches:
                raise RecordError(
                    f"{path} belongs to no batch: {self.folder / MANIFEST} has {self.batches} batches, from 0; "
                    "delete it if it is a copy, or restore the manifest"
                )
        return [batch for batch in range(self.batches) if self.shard(batch).is_file()]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing to the run; the lock ends with the process, however it ends."""
        require_no_links([self.folder / "lock", *map(self.shard, self.missing())])
        lock = FileLock(self.folder / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise RecordError(
                f"another process is working on {self.folder}; wait for it, or use another --out"
            ) from error
        except OSError as error:
            raise DataError(f"cannot write into {self.folder}: {error.strerror}; use another --out") from error
        try:
            current = Run.open(self.folder)
            if (current.key, current.batch) != (
                self.key,
                self.batch,
            ):  # created by another command before we had the lock
                raise RecordError(f"{self.folder} was taken by another run meanwhile; run again, or use another --out")
            yield
        finally:
            lock.release()


def find_runs(folders: Sequence[str | Path]) -> tuple[list[Run], list[str]]:
    """The runs in these folders or below them; and a sentence on each that is left out, with its path and the reason.

    A folder that holds a run itself is that run, and its manifest must be sound.
    """
    runs: dict[Path, Run] = {}
    left_out: dict[Path, str] = {}
    for root in map(Path, folders):
        below = {path.parent.resolve(): path.parent for path in sorted(root.rglob(MANIFEST))}
        if (root / MANIFEST).is_file():
            runs[root.resolve()] = Run.open(root)
            left_out |= {key: f"{run} lies in the folder of another run; name it, too" for key, run in below.items()}
            continue
        problems = []
        for key, folder in below.items():
            try:
                runs[key] = Run.open(folder)
            except RecordError as error:
                problems.append(str(error))
                left_out[key] = problems[-1]
        if len(problems) == len(below):
            raise RecordError([*problems, f"no run in {root}; make one with: patchcleanser certify --out RUN …"][0])
    return list(runs.values()), [text for key, text in left_out.items() if key not in runs]


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    return status.st_ino, status.st_size, status.st_mtime_ns
