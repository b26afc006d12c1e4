"""The facts that packed weights depend on, and whether kernels let them be kept."""

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
    """The facts that packed weights depend on, as texts by name.

    Attributes:
        asked: checkpoint, form and level; others are kept beside these.
        made_by: versions of what packs, of which the last is kept.
    """

    asked: dict[str, str]
    made_by: dict[str, str]

    @property
    def address(self) -> str:
        """The name of the file that holds what is asked for."""
        return checksum(self.asked)[:32]


def judge_layouts(planned: Plan) -> Verdict:
    """Accept a plan whose kernels all say what the bytes of their constants mean."""
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
    """Return what the packed weights of a plan depend on."""
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
    used = {*_PARTS}
    for choice, prefixes in planned.resolver.choices.values():
        request, chosen = choice.request, choice.chosen
        if request.kind == "platform":
            continue
        used.add(chosen.provider)
        layout = getattr(chosen.record, "layout", 0)
        where = checksum([list(map(str, request.key)), prefixes])[:12]
        made_by[f"{request.kind} {request.name} ({where})"] = (
            f"{chosen.qualified_name} {chosen.version}" + f", layout {layout}" * bool(layout)
        )
    for plugin in registry.plugins.loaded:
        if plugin.distribution in used:
            installed = plugin.source.installed
            code = "" if installed is None else f" ({installed.fingerprint[:16]})"
            made_by[f"code of {plugin.distribution}"] = f"{plugin.version}{code}"
    return PackedKey(asked, made_by)


def difference(held: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return what differs first, empty where nothing does."""
    for name in sorted({*held, *now}):
        if held.get(name) != now.get(name):
            was, wanted = held.get(name, "nothing"), now.get(name, "nothing")
            return f"it was packed for another {name}: {was:.200}, not {wanted:.200}"
    return ""


def _identity(checkpoint: Checkpoint | CheckpointFile) -> str:
    files = checkpoint.shards if isinstance(checkpoint, Checkpoint) else (checkpoint.path,)
    return "; ".join(map(_file_identity, files))


def _file_identity(path: Path) -> str:
    """Return name, size, time of change, and a digest of samples."""
    facts = path.stat()
    return f"{path.name}, {facts.st_size} bytes, {facts.st_mtime_ns}, {sampled_digest(path)}"


def _text(value: object) -> str:
    """Return the one text for ``value``; configurations of models may hold infinity."""
    return json.dumps(value, sort_keys=True, default=str)
