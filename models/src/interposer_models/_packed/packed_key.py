"""The key of packed weights, and whether kernels allow weights to be packed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from interposer import CheckpointFile, Verdict
from interposer.records import Kernel
from interposer.tooling import checksum
from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._checkpoint.file_digest import sampled_digest
from interposer_models._engine.cache_budget import is_host
from interposer_models._plan import Plan

_PARTS = ("interposer-models", "interposer-ops", "interposer-quantization")


@dataclass(frozen=True, slots=True)
class PackedKey:
    """The key of packed weights: all facts that the packed bytes depend on, as texts by name.

    Attributes:
        asked: checkpoint, form and CPU level. Files with other values can exist side by side.
        made_by: versions of kernels and packages. A new version replaces the file.
    """

    asked: dict[str, str]
    made_by: dict[str, str]

    @property
    def address(self) -> str:
        """Name of the file, a digest of ``asked``."""
        return checksum(self.asked)[:32]


def judge_layouts(planned: Plan) -> Verdict:
    """Accept a plan if every kernel that prepares constants states the layout."""
    placement = planned.placement
    if not is_host(placement.platform):
        return Verdict.refuse(f"memory of {placement.platform.name} maps no files")
    for choice, _ in planned.resolver.choices.values():
        record = choice.chosen.record
        if isinstance(record, Kernel) and record.prepare and not record.layout:
            return Verdict.refuse(
                f"{choice.chosen.qualified_name} prepares constants and states no layout of them"
            )
    return Verdict.accept()


def packed_key(planned: Plan, checkpoint: Checkpoint | CheckpointFile) -> PackedKey:
    """Return the key of the packed weights of a plan."""
    capability = planned.placement.device.capability
    config = planned.resolver.config
    asked = {
        "checkpoint": _identity(checkpoint),
        "config": checksum(_text(checkpoint.config)),
        "dtype": str(planned.dtype),
        "quantization": _text(planned.quantization),
        "platform": planned.placement.platform.name,
        "level": " ".join([capability.architecture, sys.byteorder, *sorted(capability.features)]),
        "numerics": f"{config.float32} {config.reduce_in_16_bits} {config.dequantize}",
    }
    if (ranks := planned.resolver.ranks) is not None:
        asked["share"] = f"{ranks.rank} of {ranks.size}"
    registry, made_by = planned.resolver.registry, {"torch": str(torch.__version__)}
    distributions = {*_PARTS}
    for choice, prefixes in planned.resolver.choices.values():
        request, chosen = choice.request, choice.chosen
        if request.kind == "platform":
            continue  # part of ``asked``
        distributions.add(chosen.provider)
        layout = getattr(chosen.record, "layout", 0)
        location = checksum([list(map(str, request.key)), prefixes])[:12]
        made_by[f"{request.kind} {request.name} ({location})"] = (
            f"{chosen.qualified_name} {chosen.version}" + f", layout {layout}" * bool(layout)
        )
    for plugin in registry.plugins.loaded:
        if plugin.distribution in distributions:
            installed = plugin.source.installed
            # The fingerprint of the installed files: a version may be edited in place.
            code = "" if installed is None else f" ({installed.fingerprint[:16]})"
            made_by[f"code of {plugin.distribution}"] = f"{plugin.version}{code}"
    return PackedKey(asked, made_by)


def difference(packed: Mapping[str, str], current: Mapping[str, str]) -> str:
    """Describe the first difference between a file's facts and the current ones; "" if equal."""
    for name in sorted({*packed, *current}):
        if packed.get(name) != current.get(name):
            before, now = packed.get(name, "nothing"), current.get(name, "nothing")
            return f"it was packed for another {name}: {before:.200}, not {now:.200}"
    return ""


def _identity(checkpoint: Checkpoint | CheckpointFile) -> str:
    files = checkpoint.shards if isinstance(checkpoint, Checkpoint) else (checkpoint.path,)
    return "; ".join(map(_file_identity, files))


def _file_identity(path: Path) -> str:
    """Return name, size, modification time, and a digest of samples of a file."""
    facts = path.stat()
    return f"{path.name}, {facts.st_size} bytes, {facts.st_mtime_ns}, {sampled_digest(path)}"


def _text(value: object) -> str:
    """Return a canonical text for ``value``; configurations of models may contain infinity."""
    return json.dumps(value, sort_keys=True, default=str)
