"""The check of a layer against the standard one, built from references in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from interposer import Candidate, Config, Device, PluggableLayer, Registry, Resolver, Site
from interposer_testing._checks.call import tensors_of
from interposer_testing._checks.comparison import compare_form, compare_value
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.operand import Operand
from interposer_testing.cases._layer import LayerCase, OfLayer, Placed


def check_layer(
    registry: Registry,
    device: Device,
    standard: Candidate,
    candidate: Candidate,
    case: LayerCase,
    dtype: torch.dtype,
) -> list[Fault]:
    """Return everything in which a layer departs from the standard one on ``case``.

    Both load the same parameters. The values of the standard layer in float64 and the form of its
    result in ``dtype`` are what is expected, both from references only, with the parts and the
    attention of those who offer the standard one. The layer under test binds the kernels that are
    chosen without measurements, a replacement those of its own provider first, which it may compute
    at once. It must leave its inputs alone.
    """
    fixed: dict[str, Any] = {"canary": "off", "tables": False}
    theirs = _prefer(standard)
    own = {} if candidate is standard else _prefer(candidate)
    parts = {} if candidate is standard else _prefer(candidate, standard)
    config = Config(layers=parts | _pin(candidate), kernels=own, attention=own, **fixed)
    plain = Config(
        layers=theirs | _pin(standard), kernels={"*": "reference"}, attention=theirs, **fixed
    )
    build = _Builder(registry, standard, case)
    layer = build.layer(device, config, dtype)
    operands = [
        Operand(value, device.torch_device) if isinstance(value, torch.Tensor) else value
        for value in case.inputs
    ]
    given = [o.tensor if isinstance(o, Operand) else o for o in operands]
    found = _call(layer, case, given, device.torch_device)
    host = Device(device.platform, "cpu", device.name, device.capability)
    wide = [_widened(value) for value in case.inputs]
    expected = tensors_of(_call(build.layer(host, plain, torch.float64), case, wide, "cpu"))
    form = _call(build.layer(host, plain, dtype), case, list(case.inputs), "cpu")
    faults = list(_compare(found, form, expected, case))
    for number, operand in enumerate(operands):
        if isinstance(operand, Operand) and operand.is_changed():
            faults.append(Fault("mutation", f"input {number}", "it is written"))
    return [
        Fault("layer", fault.where, f"{fault.reason} ({fault.check})", fault.error, fault.bound)
        for fault in faults
    ]


class _Builder:
    """Builds the layer of a case as whichever class a configuration pins."""

    def __init__(self, registry: Registry, standard: Candidate, case: LayerCase) -> None:
        self.registry = registry
        self.case = case
        self.layer_class: type[PluggableLayer] = registry.load(standard, standard.record.target)  # type: ignore[union-attr]

    def layer(self, device: Device, config: Config, dtype: torch.dtype) -> PluggableLayer:
        site = Site(Resolver(self.registry, device, config), "conformance", dtype)
        with torch.device(device.torch_device):
            arguments = {
                name: value.build(site) if isinstance(value, Placed) else value
                for name, value in self.case.arguments.items()
            }
            layer = self.layer_class(site, **arguments)
        state = {
            name: value.to(dtype) if value.dtype.is_floating_point else value
            for name, value in self.case.parameters.items()
        }
        nn.Module.load_state_dict(layer, state, strict=True)
        # Its parts are layers too, where it has any, and so may be what it was given.
        for part in (*layer.modules(), *arguments.values()):
            if isinstance(part, PluggableLayer):
                part.finalize()
        return layer


def _call(layer: PluggableLayer, case: LayerCase, inputs: list[Any], device: str) -> Any:
    with torch.no_grad():
        built = [v.build(layer, device) if isinstance(v, OfLayer) else v for v in inputs]
        return getattr(layer, case.method)(*built)


def _compare(
    found: Any, form: Any, expected: list[torch.Tensor], case: LayerCase
) -> Iterator[Fault]:
    on_device = [tensor.cpu() for tensor in tensors_of(found)]
    # A layer may return views of one product, so that its strides are its own affair.
    misshapen = [fault for fault in compare_form(_on_host(found), form) if fault.check != "stride"]
    yield from misshapen
    if any(fault.check in ("structure", "shape") for fault in misshapen):
        return
    for number, (one, other) in enumerate(zip(on_device, expected, strict=True)):
        bound = case.tolerance.bound(other, one.dtype, case.facts)
        yield from compare_value(f"output {number}", one, other, bound)


def _on_host(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, tree)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
        return value.double()
    return value


def _prefer(*candidates: Candidate) -> dict[str, Any]:
    return {"*": {"prefer": [f"{candidate.provider}/*" for candidate in candidates]}}


def _pin(candidate: Candidate) -> dict[str, Any]:
    return {candidate.record.layer_id: candidate.qualified_name}  # type: ignore[union-attr]
