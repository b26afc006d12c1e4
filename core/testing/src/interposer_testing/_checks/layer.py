"""The check of a layer against the standard layer, which runs in float64 with references."""

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
    """Compare a layer with the standard layer on ``case``; both load the same parameters.

    Expected are the values of the standard layer in float64 and the form of the result in
    ``dtype``. The standard layer uses references for all ops, and sublayers and attention of the
    same provider. The layer under test uses the kernels that are selected without measurements; a
    replacement prefers kernels of the same provider. The layer must not change its inputs.
    """
    fixed: dict[str, Any] = {"canary": "off", "tables": False}
    standard_rules = _prefer(standard)
    own_rules = {} if candidate is standard else _prefer(candidate)
    layer_rules = {} if candidate is standard else _prefer(candidate, standard)
    config = Config(
        layers=layer_rules | _pin(candidate), kernels=own_rules, attention=own_rules, **fixed
    )
    reference_config = Config(
        layers=standard_rules | _pin(standard),
        kernels={"*": "reference"},
        attention=standard_rules,
        **fixed,
    )
    build = _Builder(registry, standard, case)
    layer = build.layer(device, config, dtype)
    operands = [
        Operand(value, device.torch_device) if isinstance(value, torch.Tensor) else value
        for value in case.inputs
    ]
    inputs = [o.tensor if isinstance(o, Operand) else o for o in operands]
    result = _call(layer, case, inputs, device.torch_device)
    # The standard layer runs on the CPU, which always supports float64.
    host = Device(device.platform, "cpu", device.name, device.capability)
    wide = [_widened(value) for value in case.inputs]
    expected_layer = build.layer(host, reference_config, torch.float64)
    expected = tensors_of(_call(expected_layer, case, wide, "cpu"))
    form = _call(build.layer(host, reference_config, dtype), case, list(case.inputs), "cpu")
    faults = list(_compare(result, form, expected, case))
    for number, operand in enumerate(operands):
        if isinstance(operand, Operand) and operand.is_changed():
            faults.append(Fault("mutation", f"input {number}", "it is written"))
    return [
        Fault("layer", fault.where, f"{fault.reason} ({fault.check})", fault.error, fault.bound)
        for fault in faults
    ]


class _Builder:
    """Builds the layer of a case; the configuration selects the class."""

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
        # Sublayers need finalization too, and arguments of the layer may be layers.
        for part in (*layer.modules(), *arguments.values()):
            if isinstance(part, PluggableLayer):
                part.finalize()
        return layer


def _call(layer: PluggableLayer, case: LayerCase, inputs: list[Any], device: str) -> Any:
    with torch.no_grad():
        values = [v.build(layer, device) if isinstance(v, OfLayer) else v for v in inputs]
        return getattr(layer, case.method)(*values)


def _compare(
    result: Any, form: Any, expected: list[torch.Tensor], case: LayerCase
) -> Iterator[Fault]:
    outputs = [tensor.cpu() for tensor in tensors_of(result)]
    # A layer may return views of one fused matmul, so any strides are allowed.
    form_faults = [f for f in compare_form(_on_host(result), form) if f.check != "stride"]
    yield from form_faults
    if any(fault.check in ("structure", "shape") for fault in form_faults):
        return
    for number, (output, expected_output) in enumerate(zip(outputs, expected, strict=True)):
        error_bound = case.tolerance.bound(expected_output, output.dtype, case.facts)
        yield from compare_value(f"output {number}", output, expected_output, error_bound)


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
