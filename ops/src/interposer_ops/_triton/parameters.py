"""Launch parameters as data: one JSON file per kernel, one entry per architecture.

``norms/tuning/rms_norm.json`` says for ``rms_norm``:

    {"default": {"num_warps": 8, "num_stages": 1, "blocks": {"width": 8192, "tile": 1024}},
     "sm_90": {"num_warps": 16, "num_stages": 1, "blocks": {"width": 16384, "tile": 1024}}}

``num_warps`` is a power of two up to 16, ``num_stages`` is between 1 and 8, and blocks are powers
of two. Every entry must have the block names of ``default``, which the kernel reads. An
architecture without an entry uses the entry of the nearest older architecture of its family (sm_86
uses sm_80, gfx90a has none), or else ``default``.

A file is read when a kernel is first launched on a device. ``table_of`` can merge measured entries
from another distribution over the entries of this package; no record names such a file yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import triton
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from interposer.errors import ConfigError, UnknownNameError

ARCHITECTURES = (
    "default",
    "interpreter",
    *("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"),
    *("gfx908", "gfx90a", "gfx942", "gfx950"),
    *("gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201"),
)
"""The entry names that a tuning file may contain."""

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parents[1]
_META = torch.device("meta")
_assumptions: dict[torch.device, str] = {}
# The caches of all ``per_device`` functions, which ``assumed`` has to clear.
_caches: list[Any] = []


def _power_of_two(value: int) -> int:
    if value < 1 or value & (value - 1):
        raise ValueError("must be a power of two")
    return value


_PowerOfTwo = Annotated[int, AfterValidator(_power_of_two)]


class Parameters(BaseModel):
    """Launch parameters of a kernel on one architecture.

    Attributes:
        num_warps: maximum number of warps per program.
        num_stages: loop iterations in flight in triton's software pipeline.
        blocks: tile sizes by name, powers of two; each kernel defines the names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_warps: Annotated[_PowerOfTwo, Field(le=16)]
    num_stages: Annotated[int, Field(ge=1, le=8)]
    blocks: Mapping[str, _PowerOfTwo]

    @property
    def compiled(self) -> dict[str, int]:
        """``num_warps`` and ``num_stages`` as keyword arguments of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def per_device(function: F) -> F:
    """Cache all results of ``function``, which takes a device among its arguments.

    Decorate every function that calls ``parameters_for``: each launch then costs one lookup, and
    ``assumed`` can clear the caches.
    """
    cached = cache(function)
    _caches.append(cached)
    return cached  # type: ignore[return-value]


@per_device
def parameters_for(kernel: str, device: torch.device) -> Parameters:
    """Return the launch parameters of ``kernel`` on ``device``."""
    table = table_of(kernel)
    return table[_nearest(architecture(device), table)]


def table_of(kernel: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Parameters]:
    """Return the launch parameters of ``kernel`` by architecture.

    Args:
        overrides: entries in the form of a tuning file; they replace entries of this package.

    Raises:
        UnknownNameError: unknown kernel, architecture, key or block.
        ConfigError: a value is out of range.
    """
    files = tuned_kernels()
    if kernel not in files:
        raise UnknownNameError("kernel", kernel, files, where="in interposer_ops/*/tuning")
    package_entries = json.loads(files[kernel].read_text(encoding="utf-8"))
    entries = {**package_entries, **(overrides or {})}
    where = f"in the tuning of {kernel}"
    table = {name: _checked(name, entry, where) for name, entry in entries.items()}
    names = table["default"].blocks
    for name, parameters in table.items():
        for block in {*parameters.blocks} ^ {*names}:
            if block in names:
                raise ConfigError(f"{where}, {name} has no block {block!r}, which default has")
            raise UnknownNameError("block", block, names, where=f"{where}, {name}")
    return table


@cache
def tuned_kernels() -> Mapping[str, Path]:
    """Return the paths of all tuning files by kernel."""
    return {path.stem: path for path in sorted(_PACKAGE.glob("*/tuning/*.json"))}


def architecture(device: torch.device) -> str:
    """Return the architecture name of ``device``: sm_90, gfx942, interpreter.

    For the meta device, the name is the one set by ``assumed``.
    """
    if device in _assumptions:
        return _assumptions[device]
    if triton.knobs.runtime.interpret:
        return "interpreter"
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "cuda":
        return f"sm_{target.arch}"
    # HIP appends features of the device, as in gfx90a:sramecc+:xnack-.
    return target.arch.split(":")[0] if target.backend == "hip" else str(target.backend)


@contextmanager
def assumed(name: str) -> Iterator[None]:
    """Pretend, in a ``with`` block, that the meta device has the architecture ``name``."""
    _clear_caches()
    _assumptions[_META] = name
    try:
        yield
    finally:
        _assumptions.pop(_META)
        _clear_caches()


def _clear_caches() -> None:
    for cached in _caches:
        cached.cache_clear()


def _nearest(name: str, table: Mapping[str, Parameters]) -> str:
    """Choose the tuning entry: the newest of the same family up to ``name``, or "default"."""
    family, number = _generation(name)
    same_family = [
        (_generation(entry)[1], entry)
        for entry in table
        if entry != "default" and _generation(entry)[0] == family
    ]
    return max((pair for pair in same_family if pair[0] <= number), default=(0, "default"))[1]


def _generation(name: str) -> tuple[str, int]:
    """Split an architecture name: ("sm", 90) for sm_90a, ("gfx9", 0x42) for gfx942."""
    if match := re.fullmatch(r"sm_(\d+)[af]?", name):
        return "sm", int(match[1])
    # Minor version and stepping of a gfx architecture are hexadecimal digits.
    if match := re.fullmatch(r"(gfx\d+)([0-9a-f]{2})", name):
        return match[1], int(match[2], 16)
    return name, 0


def _checked(name: str, entry: Mapping[str, Any], where: str) -> Parameters:
    if name not in ARCHITECTURES:
        raise UnknownNameError("architecture", name, ARCHITECTURES, where=where)
    for key in entry:
        if key not in Parameters.model_fields:
            raise UnknownNameError("key", key, Parameters.model_fields, where=f"{where}, {name}")
    try:
        return Parameters.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{where}, {name} has {path}={first['input']!r}: {first['msg']}"
        ) from error
