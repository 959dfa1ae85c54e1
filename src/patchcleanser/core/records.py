"""Records: one row per image, in Parquet shards beside a manifest that says what produced them.

    RUN/manifest.json          the job, its key, how many images, how many to a batch
    RUN/rows-00000.parquet     the rows of the first batch, and so on
    RUN/lock                   held by whoever is writing

A shard is written whole or not at all and named by its batch, so a batch is done if its shard is
there, a killed run loses at most the batch in flight, and whoever writes a batch again writes the
same rows. Everything downstream is derived from the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from filelock import FileLock, Timeout
from pyarrow import parquet

from patchcleanser.core.files import whole_file
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.threats import Threat
from patchcleanser.core.windows import Size
from patchcleanser.errors import DataError, RecordError

FORMAT = 1
MANIFEST = "manifest.json"

SCHEMA = pa.schema(
    [
        ("index", pa.int64()),  # position among the run's images
        ("id", pa.string()),
        ("label", pa.int32()),
        ("skipped", pa.string()),  # why there is no answer; null where there is one
        ("height", pa.int32()),  # on the threat's grid
        ("width", pa.int32()),
        ("undefended", pa.int32()),
        ("one_mask_labels", pa.list_(pa.int32())),
        ("one_mask_margins", pa.list_(pa.float32())),
        ("one_mask_confidences", pa.list_(pa.float32())),
        ("table", pa.list_(pa.int32())),  # labels by union of two masks, where all were asked for
        ("answer", pa.int32()),
        ("case", pa.string()),
        ("deciding_mask", pa.int32()),
        ("alert", pa.bool_()),  # detection only
        ("certified", pa.bool_()),
        ("row_certified", pa.bool_()),
        ("detection_certified", pa.bool_()),  # a weaker promise, and so a column of its own
        ("failing_pair", pa.list_(pa.int32())),  # two masks under which the label is wrong
        ("weakest", pa.list_(pa.int32())),  # top, left, height, width of each patch the proof does not reach
        ("margin", pa.float32()),
        ("classifications", pa.int32()),
        ("rechecked", pa.int32()),  # fast labels computed again in float32
        ("flipped", pa.int32()),  # of those, the ones that were wrong
        ("audited", pa.int32()),  # labels that were not doubtful, computed both ways
        ("caught", pa.int32()),  # of those, the ones that were wrong; then the whole batch was computed in float32
        ("seconds", pa.float32()),
    ]
)
ATTACKED = pa.schema(
    [
        ("index", pa.int64()),
        ("id", pa.string()),
        ("label", pa.int32()),
        ("skipped", pa.string()),
        ("height", pa.int32()),  # on the threat's grid
        ("width", pa.int32()),
        ("undefended", pa.int32()),  # of the clean image, as are the next ones
        ("answer", pa.int32()),
        ("alert", pa.bool_()),
        ("certified", pa.bool_()),
        ("row_certified", pa.bool_()),
        ("detection_certified", pa.bool_()),
        ("undefended_fooled", pa.bool_()),  # wrong on the clean image, or at some location
        ("fooled", pa.bool_()),  # the defense is: it answers wrongly, without an alert
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
SCHEMAS = {"certify": SCHEMA, "attack": ATTACKED}
"""The rows of each kind of run; a job that names no kind certifies."""

LATER = ("caught",)
"""Columns that older rows do not have."""

TIMES = ("seconds",)
"""What may differ between two runs of one job."""

Row = dict[str, Any]


def key_of(job: Mapping[str, Any]) -> str:
    """A hash of everything that decides the rows.

    >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(job, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


@dataclass(frozen=True)
class Run:
    """A run folder. `job` decides the rows; `about` says under what circumstances they were made."""

    folder: Path
    job: dict[str, Any]
    images: int
    batch: int
    about: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """The run in this folder."""
        path = Path(folder) / MANIFEST
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise RecordError(f"{path} has format {found['format']}, this version reads {FORMAT}")
            if found["key"] != key_of(found["job"]):
                raise RecordError(f"{path} was changed by hand: its key does not fit its job")
            return cls(Path(folder), found["job"], found["images"], found["batch"], found["about"])
        except FileNotFoundError as error:
            raise RecordError(f"no run in {folder}: it holds no {MANIFEST}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path} is damaged ({error}); use another folder") from error

    @classmethod
    def begin(
        cls, folder: str | Path, job: Mapping[str, Any], *, images: int, batch: int, about: Mapping[str, Any]
    ) -> Run:
        """The run of this job in this folder: continued if it is there, else begun.

        A run goes on with the batches it began with, since batches name the shards.
        """
        folder = Path(folder)
        if (folder / MANIFEST).exists():
            run = cls.open(folder)
            differs = [name for name in sorted({*run.job, *job}) if run.job.get(name) != job.get(name)]
            if differs:
                said = ", ".join(f"{n} ({_short(run.job.get(n))}, now {_short(job.get(n))})" for n in differs)
                hint = " (other images: --data, --limit, --seed or --subset)" if "data" in differs else ""
                raise RecordError(f"{folder} holds a run of another job; it differs in {said}{hint}; use another --out")
            return run
        if folder.is_dir() and any(folder.glob("rows-*.parquet")):
            raise RecordError(f"{folder} holds rows but no {MANIFEST}; use another --out")
        content = {"format": FORMAT, "key": key_of(job), "job": job, "images": images, "batch": batch, "about": about}
        with whole_file(folder / MANIFEST) as part:
            part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return cls(folder, dict(job), images, batch, dict(about))

    @property
    def key(self) -> str:
        """The hash of the job."""
        return key_of(self.job)

    @property
    def kind(self) -> str:
        """What was done: certify or attack."""
        return str(self.job.get("kind", "certify"))

    @property
    def schema(self) -> pa.Schema:
        """The columns of its rows."""
        return SCHEMAS[self.kind]

    @cached_property
    def threat(self) -> Threat:
        """The patches defended against."""
        return Threat.from_json(self.job["threat"])

    def mask_set(self, size: Size) -> MaskSet:
        """The masks that images of this size, on the threat's grid, were given."""
        masks, stride = (tuple(v) if v else None for v in (self.job["masks"], self.job["stride"]))
        return MaskSet.build(self.threat, image=size, masks=masks, stride=stride)

    @property
    def batches(self) -> int:
        """How many batches the whole run has."""
        return -(-self.images // self.batch)

    def indices(self, batch: int) -> range:
        """The images of a batch."""
        return range(batch * self.batch, min((batch + 1) * self.batch, self.images))

    def shard(self, batch: int) -> Path:
        """Where the rows of a batch are, or will be."""
        return self.folder / f"rows-{batch:05d}.parquet"

    def missing(self) -> list[int]:
        """The batches that are not done."""
        return [batch for batch in range(self.batches) if not self.shard(batch).is_file()]

    @property
    def finished(self) -> bool:
        """Whether every batch is done."""
        return not self.missing()

    def write(self, batch: int, rows: Sequence[Row]) -> None:
        """Keep the rows of one batch, whole or not at all."""
        table = pa.Table.from_pylist(list(rows), schema=self.schema)
        with whole_file(self.shard(batch)) as part:
            parquet.write_table(table, part, compression="zstd")

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows that are there, in the order of the images."""
        parts = [self.read_batch(batch, columns) for batch in range(self.batches) if self.shard(batch).is_file()]
        if parts:
            return pa.concat_tables(parts)
        return self.schema.empty_table().select(list(columns) if columns is not None else self.schema.names)

    def read_batch(self, batch: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of one batch."""
        path = self.shard(batch)
        try:
            table = parquet.ParquetFile(path).read(columns=None if columns is None else list(columns))
        except (pa.ArrowInvalid, OSError) as error:
            raise RecordError(f"{path} is damaged ({error}); delete it and run again") from error
        for name in LATER:
            if name in self.schema.names and name not in table.column_names:
                field = self.schema.field(name)
                table = table.append_column(field, pa.nulls(len(table), field.type))
        known = [name for name in self.schema.names if name in table.column_names]
        return table.select(list(columns) if columns is not None else known)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time works on a run; the lock goes with the process, however it ends."""
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
            now = Run.open(self.folder)
            if (now.key, now.batch) != (self.key, self.batch):  # begun by another command before the lock was ours
                raise RecordError(f"{self.folder} was taken by another run meanwhile; run again, or use another --out")
            yield
        finally:
            lock.release()


def find_runs(folders: Sequence[str | Path], kind: str | None = "certify") -> list[Run]:
    """The runs of one kind, or of every kind, in these folders, or below them."""
    runs: list[Run] = []
    for folder in folders:
        root = Path(folder)
        manifests = [root / MANIFEST] if (root / MANIFEST).is_file() else sorted(root.rglob(MANIFEST))
        found = [run for run in (Run.open(path.parent) for path in manifests) if kind in (None, run.kind)]
        if not found:
            raise RecordError(f"no run in {folder}; make one with: patchcleanser {kind or 'certify'} --out {folder} …")
        runs += found
    return list({run.folder.resolve(): run for run in runs}.values())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}…"
