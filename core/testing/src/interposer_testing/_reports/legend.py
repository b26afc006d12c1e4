"""The legend of a report: explanations of states, aspects and checks."""

from __future__ import annotations

from collections.abc import Mapping

from interposer_testing._reports.facts import State

STATES: Mapping[State, str] = {
    "correct": "it ran here without a fault",
    "wrong": "at least one trial found a fault",
    "refused": "it refuses all cases on this device, with a reason",
    "not run": "it could not be tested here, so it may be correct or wrong",
}

ASPECTS: Mapping[str, str] = {
    "numerics": "values, shapes, aliases and writes, compared with the op's reference",
    "gradients": "gradients of the arguments, compared with the autograd of the op's reference",
    "opcheck": "the checks of torch.library.opcheck: schema, fake kernel, tracing",
    "compile static": "torch.compile as one graph with fixed shapes",
    "compile dynamic": "torch.compile as one graph with a dynamic number of rows",
    "graph capture": "capture into a device graph, and replay with other values",
    "threads": "calls from several threads at once",
    "determinism": "equal calls give the same bits",
    "batch invariance": "a row gives the same bits in every batch",
    "records": "the targets of the record exist and have the right signatures",
    "lightness": "the plugin module does not import torch",
    "wheel": "a wheel with native code has the tag of a platform",
    "layer": "the layer, compared with the standard layer",
    "scheme": "a quantized layer, compared with its dequantized weight",
    "model": "logits and tokens of small models, compared with transformers",
    "communicator": "collectives in several processes, and the loss of a process",
}

CHECKS: Mapping[str, str] = {
    "alias": "a result shares memory with another tensor, or a later call changes it",
    "batch": "the result of a row depends on other rows, but the record declares batch_invariant",
    "call": "it accepted the case, but raised, crashed or did not return",
    "compile": "torch.compile fails or gives other results, but the record declares that it works",
    "determinism": "equal calls give different bits, but the record declares deterministic",
    "dtype": "the dtype of the result differs from the reference",
    "graph": "capture or replay as a graph fails, but the record declares graph_safe",
    "guard": "it writes to memory outside its arguments",
    "import": "code cannot be imported, or imports a forbidden package",
    "layer": "the layer differs from the standard layer that it replaces",
    "model": "the model differs from the transformers model with the same config",
    "mutation": "it writes to an argument that the op does not declare as mutated",
    "opcheck": "torch.library.opcheck fails",
    "ranks": "a lost rank is not detected in time, or processes or files remain after close",
    "record": "the code does not match the record",
    "scheme": "the scheme differs from its own declarations",
    "shape": "the shape of the result differs from the reference",
    "stride": "the strides of the result differ from the fake kernel, which misleads torch.compile",
    "structure": "the type or number of results differs from the reference",
    "thread": "concurrent calls give wrong results",
    "value": "the error against the float64 reference is larger than rounding explains",
    "wheel": "the wheel can be installed on machines where it cannot run",
}
