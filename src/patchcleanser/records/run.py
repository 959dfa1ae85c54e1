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
from dataclasses import dataclass, field, replace
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
from patchcleanser.records.columns import COLUMNS_OF, SCHEMAS
from patchcleanser.records.leftovers import ANOTHER_FOLDER, batch_of_shards, require_free, require_no_links
from patchcleanser.records.metrics import Summary, error_rate_bound, summary
from patchcleanser.records.provenance import MANIFEST, key_of, read_manifest, short, write_manifest
from patchcleanser.records.shards import DamageError, check_shard, read_shard, type_name, write_shard

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
    counted: frozenset[int] | None = field(default=None, repr=False, compare=False)
    """The batches that count; None for all that are done."""
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
        run = cls.found(folder, job)
        if run is not None:
            return run
        run = cls(folder, dict(job), images, batch_of_shards(folder, job, images) or batch, dict(metadata))
        columns = {column.name: type_name(column.type) for column in run.schema}
        write_manifest(folder, {"job": job, "images": images, "batch": run.batch, "columns": columns}, metadata)
        return run

    @classmethod
    def found(cls, folder: Path, job: Mapping[str, Any]) -> Run | None:
        """The run of this job that a folder holds; RecordError if it holds one of another job, or other files."""
        if not (folder / MANIFEST).exists():
            require_no_links([folder / MANIFEST])
            require_free(folder)
            return None
        run = cls.open(folder)
        changes = ", ".join(differences(run.job, job))
        if changes:
            raise RecordError(f"{folder} holds a run of another job; it differs in {changes}; {ANOTHER_FOLDER}")
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
        return Threat.from_dict(self.job["threat"])

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

    def has(self, batch: int) -> bool:
        """Whether a batch is done, and counts."""
        return (self.counted is None or batch in self.counted) and self.shard(batch).is_file()

    def missing(self) -> list[int]:
        return [batch for batch in range(self.batches) if not self.has(batch)]

    def snapshot(self) -> Run:
        """The run as it is now: batches that another process writes from now on do not count."""
        return replace(self, counted=frozenset(self._present()))

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
        """The rows of all batches that are done, checked, in the order of the images; of some columns, or all."""
        if isinstance(columns, str):
            raise RecordError(f"columns are a list of names, as [{columns!r}], got {columns!r}")
        for name in columns or ():
            if name not in self.schema.names:
                raise RecordError.unknown("column", name, self.schema.names)
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
        return [batch for batch in range(self.batches) if self.has(batch)]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing to the run; the lock ends with the process, however it ends."""
        require_no_links([self.folder / "lock", *map(self.shard, self.missing())])
        lock = FileLock(self.folder / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise RecordError(
                f"another process is working on {self.folder}; wait for it, or {ANOTHER_FOLDER}"
            ) from error
        except OSError as error:
            raise DataError(f"cannot write into {self.folder}: {error.strerror}; {ANOTHER_FOLDER}") from error
        try:
            current = Run.open(self.folder)
            if (current.key, current.batch) != (
                self.key,
                self.batch,
            ):  # created by another command before we had the lock
                raise RecordError(f"{self.folder} was taken by another run meanwhile; repeat, or {ANOTHER_FOLDER}")
            yield
        finally:
            lock.release()


OPTIONS = {"shape": "--patch", "count": "--patches"}
OPTIONS |= {name: f"--{name}" for name in ("grid", "masks", "stride", "defense", "precision", "table", "lines")}
OPTIONS |= {name: f"--{name}" for name in ("device", "attack", "coarse", "threshold")}
"""Parts of a job, and the options of the command line that say them."""
GROUPS = {"threat": "", "options": "--option ", "settings": "--"}
"""Parts of a job that have parts themselves, and what precedes their names on the command line."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What tells two jobs apart, each with both values, and as the option that says it where there is one.

    >>> differences({"threat": {"shape": "5x5"}, "masks": [6, 6]}, {"threat": {"shape": "6x6"}, "masks": [6, 6]})
    ['--patch (5x5, now 6x6)']
    """
    changes: list[str] = []
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old == new or (name == "images" and before.get("data") != now.get("data")):
            continue
        if name in GROUPS and isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += differences(old, new, GROUPS[name])
            continue
        values = f"({_value(name, old)}, now {_value(name, new)})"
        changes.append(f"{OPTIONS.get(name, f'{prefix}{name}')} {values}")
        if name == "data":
            changes[-1] += ": other images (another dataset, limit, seed or subset)"
    return changes


def _value(name: str, value: Any) -> str:
    """A part of a job as it is typed."""
    return "x".join(map(str, value)) if name in ("masks", "stride") and value else short(value)


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
