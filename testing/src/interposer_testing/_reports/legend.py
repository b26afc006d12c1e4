"""The words of a report, explained to readers who did not write the suite."""

from __future__ import annotations

from collections.abc import Mapping

from interposer_testing._reports.facts import State

STATES: Mapping[State, str] = {
    "correct": "it ran here, and nothing was wrong",
    "wrong": "it ran here, and at least one trial found a fault",
    "refused": "it takes none of the cases on this device, and says why",
    "not run": "nothing of it could be tried here, so nothing is known of it",
}

ASPECTS: Mapping[str, str] = {
    "numerics": "results, form of results, aliases and writes, against the op's reference",
    "opcheck": "what torch.library checks of a custom op: schema, fake kernel, autograd, dispatch",
    "compile static": "torch.compile as one graph, for fixed shapes",
    "compile dynamic": "torch.compile as one graph, for shapes that change",
    "graph capture": "capture into a graph of the device, and replay with other values",
    "threads": "calls from several threads at once",
    "determinism": "the same bits from call to call",
    "batch invariance": "the same bits for a row whatever stands beside it",
    "records": "what the record declares: targets that exist, signatures that fit",
    "lightness": "import of the plugin module without torch",
    "wheel": "the tag of the wheel, which must name a platform where it holds native code",
    "layer": "the replacement of a standard layer, against the standard one",
    "scheme": "the weights of a quantized checkpoint, against their reference",
    "model": "logits and tokens of small models, against those of transformers",
    "communicator": "collectives in several processes, and the loss of one of these",
}

CHECKS: Mapping[str, str] = {
    "alias": "a result shares memory with what it must not, or a later call changes it",
    "batch": "a row's result depends on the rows beside it, though the record promises otherwise",
    "call": "it accepted the case, and then raised, or never returned",
    "compile": "torch.compile does not take it as the record promises, or then gives other results",
    "determinism": "two equal calls give different bits, though the record promises the same",
    "dtype": "the result has another dtype than the reference's",
    "graph": "it cannot be captured or replayed as a graph, though the record promises it",
    "guard": "it writes into memory beside an argument",
    "import": "code cannot be imported, or imports more than it may",
    "layer": "the layer departs from the standard one that it replaces",
    "model": "a model departs from the one of transformers for the same config",
    "mutation": "it writes an argument that the op does not declare as written",
    "opcheck": "torch.library's own check of a custom op fails",
    "ranks": "a lost rank is not missed in time, or something of a communicator is left",
    "record": "the record promises what its code does not hold",
    "scheme": "the scheme departs from what it declares",
    "shape": "the result has another shape than the reference's",
    "stride": "the result lies in memory otherwise than the fake kernel tells torch.compile",
    "structure": "it returns another kind or number of things than the reference",
    "thread": "calls from several threads disturb each other",
    "value": "the result is farther from the reference in float64 than rounding explains",
    "wheel": "the wheel would be installed on machines that it cannot run on",
}
