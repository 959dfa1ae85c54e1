"""The record of an audit, with a signature: a hash of what was derived again, attacked and contradicted.

A signature is no proof of who made it. It ties the outcome to a run, and a claim to the outcome: whoever doubts it
repeats the audit with the settings in the record, on the rows of the digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchcleanser.errors import RecordError
from patchcleanser.records.provenance import key_of
from patchcleanser.records.run import Run

AUDIT = Path("audit", "audit.json")
"""The record's place in the folder of its run."""
SIGNED = (
    *("key", "digest", "sample", "attack", "settings"),
    *("rows", "derived", "attacked", "labels", "contradictions", "near_ties"),
)
"""What the signature covers: which run, what was examined, and the outcome."""


def sign(audit: Mapping[str, Any]) -> str:
    """The signature of an audit's record."""
    return key_of({name: audit[name] for name in SIGNED})


def read_audit(run: Run) -> dict[str, Any]:
    """The audit of these very rows; RecordError if there is none, or it is not as it was written."""
    path = run.folder / AUDIT
    try:
        audit: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        signature, content = audit["signature"], sign(audit)
    except FileNotFoundError as error:
        raise RecordError(f"{run.folder} was not audited; run: patchcleanser audit {run.folder}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is damaged ({error!r}); run the audit again") from error
    if signature != content:
        raise RecordError(f"{path} does not match its signature: it was changed; run the audit again")
    if (audit["key"], audit["digest"]) != (run.key, run.digest):
        raise RecordError(f"the audit in {path} is of other rows; run it again")
    return audit
