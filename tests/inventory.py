"""The device-side assertions of torch's kernels, and the ops that are left without a guard."""

from __future__ import annotations

import json

from tests.processes import ROOT

_DATA = ROOT / "tests" / "data"
RECORDS = {
    record["id"]: record
    for record in json.loads((_DATA / "device_asserts.json").read_text(encoding="utf-8"))
}
"""By name; ``no_guard`` is the reason why nothing can be checked before the launch."""
REACHABLE = {name: record for name, record in RECORDS.items() if record["reachable"]}
UNGUARDABLE = {name for name, record in RECORDS.items() if "no_guard" in record}
LEFT_OUT = json.loads((_DATA / "unguarded_ops.json").read_text(encoding="utf-8"))
"""Ops that read bad values in silence or pass them on, each with the reason for no guard."""
