"""Layers, schemes, records and plugin modules are tried, and what is wrong with them is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from interposer import (
    Capability,
    Case,
    Device,
    Kernel,
    LinearMethod,
    OpEntry,
    PluggableLayer,
    QuantizationScheme,
    Registry,
    Site,
    Verdict,
    custom_op,
)
from interposer.records import (
    AttentionEntry,
    DeviceEntry,
    LayerEntry,
    PlatformEntry,
    Record,
    SchemeEntry,
    TuningEntry,
)
from interposer_testing import Fault, Trial, conformance
from interposer_testing._trials.trial import Aspect
from interposer_testing.cases._layer import LayerCase, Placed

pytestmark = pytest.mark.process

DEVICE = Device("cpu", "cpu", "test", Capability("any"))


def here(name: str) -> str:
    return f"{__name__}:{name}"


# An op, and a layer that applies it.


def scale_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
    yield Case("rows", {"x": x, "weight": x[0].clone()}, reduction=1, magnitude=20.0)


@custom_op("scale", cases=scale_cases, constants=("weight",))
def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


def double_first(*, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {"weight": weight}


def takes_too_little(x: torch.Tensor) -> torch.Tensor:
    return x


class Scale(PluggableLayer):
    layer_id = "scale"

    def __init__(self, site: Site, width: int) -> None:
        super().__init__(site)
        self.weight = nn.Parameter(torch.empty(width, dtype=site.dtype), requires_grad=False)
        self.bound = site.bind_kernel(scale)
        self.constant: Any = None

    def finalize(self) -> None:
        self.constant = self.bound.prepared(weight=self.weight)["weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bound.function(x, self.constant)


class SameScale(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


class WrongScale(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * 1.05


class WideScale(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double() * self.weight


class WritingScale(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(self.weight).clone()


class ForgetfulScale(Scale):
    def finalize(self) -> None:
        pass


class RenamedScale(Scale):
    def __init__(self, site: Site, width: int) -> None:
        super().__init__(site, width)
        self.weight_of_mine = self.weight
        del self.weight


class Unrelated(PluggableLayer):
    pass


def scale_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    for case in scale_cases(dtype, seed):
        x, weight = case.arguments["x"], case.arguments["weight"]
        arguments = {"width": 8}
        yield LayerCase("rows", arguments, (x,), {"weight": weight}, facts=case)


class Sharing(Scale):
    """Multiplies by the weight of another layer, as that one prepared it."""

    layer_id = "sharing"

    def __init__(self, site: Site, owner: Scale) -> None:
        super().__init__(site, 8)
        # In a tuple, so that it is no module of its own.
        self.owners = (owner,)
        self.weight = owner.weight

    def finalize(self) -> None:
        assert self.owners[0].constant is None, "it gives the weight up first"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bound.function(x, self.owners[0].constant)


class ForgettingOwner(Sharing):
    def __init__(self, site: Site, owner: Scale) -> None:
        super().__init__(site, owner)
        assert owner.prefix == "conformance.owner"
        self.owners = (Scale(site, 8),)


def sharing_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    for case in scale_layers(dtype, seed):
        owner = Placed(lambda site: Scale(site.at("owner"), 8))
        yield LayerCase("rows", {"owner": owner}, case.inputs, case.parameters, facts=case.facts)


def no_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    raise RuntimeError("no cases today")


SCALE = OpEntry("scale", here("scale"))
STANDARD = LayerEntry("scale", "standard", here("Scale"), score=0.0, cases=here("scale_layers"))

TrialsOf = Callable[..., list[Trial]]


@pytest.fixture
def trials_of(registered: Callable[..., Registry]) -> TrialsOf:
    def trials(aspect: Aspect, *records: Record) -> list[Trial]:
        everything = conformance(registered(*records), DEVICE)
        return [trial for trial in everything if trial.aspect == aspect]

    return trials


def faults_of(trials: list[Trial], name: str) -> list[Fault]:
    return [fault for trial in trials if trial.candidate.name == name for fault in trial.run()]


def test_a_correct_replacement_has_no_faults(trials_of: TrialsOf) -> None:
    same = LayerEntry("scale", "same", here("SameScale"))
    trials = trials_of("layer", SCALE, STANDARD, same)
    assert {(t.candidate.name, t.request.dtype) for t in trials} == {
        (name, dtype)
        for name in ("standard", "same")
        for dtype in ("float32", "bfloat16", "float16")
    }
    assert [fault for trial in trials for fault in trial.run()] == []


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("WrongScale", "above the bound"),
        ("WideScale", "(dtype)"),
        ("WritingScale", "it is written"),
    ],
)
def test_a_replacement_with_other_results_is_a_fault(
    trials_of: TrialsOf, target: str, words: str
) -> None:
    trials = trials_of("layer", SCALE, STANDARD, LayerEntry("scale", "other", here(target)))
    faults = faults_of(trials, "other")
    assert faults
    assert all(fault.check == "layer" for fault in faults)
    assert any(words in str(fault) for fault in faults)
    assert faults_of(trials, "standard") == []


def test_placed_arguments_are_built_at_the_site_of_the_layer(trials_of: TrialsOf) -> None:
    standard = LayerEntry(
        "sharing", "standard", here("Sharing"), score=0.0, cases=here("sharing_layers")
    )
    forgetting = LayerEntry("sharing", "forgetting", here("ForgettingOwner"))
    trials = trials_of("layer", SCALE, STANDARD, standard, forgetting)
    assert faults_of(trials, "standard") == []
    assert {fault.check for fault in faults_of(trials, "forgetting")} == {"call"}


@pytest.mark.parametrize(
    ("target", "error"), [("ForgetfulScale", "TypeError"), ("RenamedScale", "weight_of_mine")]
)
def test_a_replacement_that_raises_is_a_fault(trials_of: TrialsOf, target: str, error: str) -> None:
    trials = trials_of("layer", SCALE, STANDARD, LayerEntry("scale", "other", here(target)))
    faults = faults_of(trials, "other")
    assert {fault.check for fault in faults} == {"call"}
    assert all(error in fault.reason for fault in faults)


def test_a_layer_without_cases_is_not_run(trials_of: TrialsOf) -> None:
    plain = LayerEntry("scale", "standard", here("Scale"), score=0.0)
    same = LayerEntry("scale", "same", here("SameScale"))
    trials = trials_of("layer", SCALE, plain, same)
    assert {trial.candidate.name for trial in trials} == {"standard", "same"}
    reason = "the standard layer, acme/standard, declares no cases"
    assert {trial.not_run for trial in trials} == {reason}
    (alone,) = trials_of("layer", SCALE, same)
    assert alone.not_run == "the standard layer is not installed"
    assert alone.run() == []


def test_cases_of_a_layer_that_raise_are_a_fault(trials_of: TrialsOf) -> None:
    raising = LayerEntry("scale", "standard", here("Scale"), cases=here("no_layers"))
    (trial,) = trials_of("layer", SCALE, raising)
    (fault,) = trial.run()
    assert fault.check == "layer"
    assert "no cases today" in fault.reason


# Schemes.


class ByteMethod(LinearMethod):
    """Stores bytes with a scale per output."""

    factor = 1.0
    dtype: torch.dtype | None = None
    states_weight = True

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        weight = torch.empty(out_features, in_features, dtype=torch.int8)
        factors = torch.empty(out_features, dtype=torch.float32)
        offset = torch.empty(out_features, dtype=site.dtype) if bias else None
        for name, tensor in (("weight", weight), ("weight_scale", factors), ("bias", offset)):
            parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            layer.register_parameter(name, parameter)

    def dequantized(self, layer: nn.Module) -> torch.Tensor | None:
        if not self.states_weight:
            return None
        factors = layer.get_parameter("weight_scale").double()
        return layer.get_parameter("weight").double() * factors[:, None]

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        def kernel(x: torch.Tensor, weight: torch.Tensor, factors: Any, bias: Any) -> torch.Tensor:
            wide = weight.float() * factors[:, None] * self.factor
            y = nn.functional.linear(x.float(), wide, None if bias is None else bias.float())
            return y.to(self.dtype or x.dtype)

        names = ("weight", "weight_scale", "bias")
        return kernel, tuple(layer._parameters[name] for name in names)


class LoudMethod(ByteMethod):
    factor = 1.01


class RoundedMethod(ByteMethod):
    """Rounds its inputs, and denies it where it is asked whether it can do without."""

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x.round().double()

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        kernel, operands = super().finalize(layer)
        return lambda x, *rest: kernel(x.round(), *rest), operands


class DenyingMethod(RoundedMethod):
    def dequantizable(self) -> Verdict:
        return Verdict.accept()


class LoudMethodWithoutAWeight(LoudMethod):
    states_weight = False


class EndlessMethod(ByteMethod):
    factor = float("inf")
    states_weight = False


class WideMethod(ByteMethod):
    dtype = torch.float64


class ByteScheme(QuantizationScheme):
    method = "byte"
    methods: Mapping[str, type[LinearMethod] | None] = {
        "healthy": ByteMethod,
        "loud": LoudMethod,
        "rounded": RoundedMethod,
        "denying": DenyingMethod,
        "unstated": LoudMethodWithoutAWeight,
        "endless": EndlessMethod,
        "wide": WideMethod,
        "plain": None,
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> ByteScheme:
        return cls(settings)

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        method = self.methods[self.settings["how"]]
        return method() if method else None


class UnparsedScheme(ByteScheme):
    parse = None  # type: ignore[assignment]


def examples() -> Mapping[str, Mapping[str, Any]]:
    return {how: {"quant_method": "byte", "how": how} for how in ByteScheme.methods}


SCHEME = SchemeEntry("byte", "byte", here("ByteScheme"), examples=here("examples"))


def test_a_scheme_is_tested_on_its_examples(trials_of: TrialsOf) -> None:
    trials = trials_of("scheme", SCHEME)
    assert len(trials) == 3 * len(ByteScheme.methods)
    found: dict[str, list[Fault]] = {}
    for trial in trials:
        found.setdefault(trial.label, []).extend(trial.run())
    assert found["healthy"] == []
    # What a method does not state is not checked.
    assert found["unstated"] == []
    assert found["rounded"] == []
    assert found["denying"]
    assert all(fault.where.startswith("dequantized, input") for fault in found["denying"])
    words = {
        "loud": "above the bound",
        "endless": "not finite",
        "wide": "torch.float64",
        "plain": "so nothing can be checked",
    }
    for label, reason in words.items():
        assert found[label], label
        assert all(fault.check == "scheme" and reason in str(fault) for fault in found[label])


def test_a_scheme_without_examples_is_not_run(trials_of: TrialsOf) -> None:
    (trial,) = trials_of("scheme", SchemeEntry("byte", "byte", here("ByteScheme")))
    assert trial.not_run == "the record names no examples of settings"


# Records.


def judge_nothing() -> None:
    """Take no request."""


HEALTHY: list[Record] = [
    SCALE,
    Kernel("scale", "good", here("scale"), prepare=here("double_first")),
    STANDARD,
    SCHEME,
]


def test_correct_records_have_no_faults(trials_of: TrialsOf) -> None:
    trials = trials_of("records", *HEALTHY)
    assert len(trials) == len(HEALTHY)
    assert [fault for trial in trials for fault in trial.run()] == []


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (OpEntry("other", here("nowhere")), "nowhere"),
        (OpEntry("other", here("scale")), "whose name is 'scale'"),
        (OpEntry("other", here("judge_nothing")), "not a CustomOp"),
        (Kernel("scale", "other", here("takes_too_little")), "it takes (x: "),
        (Kernel("scale", "other", here("scale"), predicate=here("judge_nothing")), "it takes ()"),
        (Kernel("scale", "other", here("scale"), prepare=here("takes_too_little")), "weight="),
        (Kernel("scale", "other", here("scale"), prepare=here("missing")), "missing"),
        (Kernel("scale", "other", here("scale"), confirm=here("judge_nothing")), "it takes ()"),
        (LayerEntry("scale", "other", here("Unrelated")), "subclasses no layer"),
        (LayerEntry("scale", "other", here("Scale"), cases=here("missing")), "missing"),
        (SchemeEntry("byte", "other", here("Scale")), "QuantizationScheme"),
        (SchemeEntry("byte", "other", here("UnparsedScheme")), "classmethod"),
        (SchemeEntry("byte", "other", here("ByteScheme"), examples=here("missing")), "missing"),
        (AttentionEntry("other", here("Scale")), "AttentionBackend"),
        (PlatformEntry("cpu", here("Scale")), "Platform"),
        (DeviceEntry("other", "cpu", "interposer:missing.json"), "missing.json"),
        (TuningEntry("other", "*", "interposer:py.typed"), "StorageError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_record_with_a_wrong_target_is_a_fault(
    trials_of: TrialsOf, record: Record, words: str
) -> None:
    trials = trials_of("records", SCALE, record)
    faults = [
        fault for trial in trials if trial.candidate.record is record for fault in trial.run()
    ]
    assert faults
    assert all(fault.check == "record" for fault in faults)
    assert any(words in str(fault) for fault in faults), list(map(str, faults))
    assert faults_of(trials, "reference") == [] or isinstance(record, OpEntry)


def test_a_kernel_of_an_unknown_op_is_a_fault(trials_of: TrialsOf) -> None:
    (trial,) = trials_of("records", Kernel("nothing", "other", here("scale")))
    (fault,) = trial.run()
    assert str(fault) == "op 'nothing': no installed plugin declares it (record)"


def test_a_record_for_another_platform_is_not_run(trials_of: TrialsOf) -> None:
    elsewhere = Kernel("scale", "other", here("nowhere"), platform="elsewhere")
    trials = trials_of("records", SCALE, elsewhere)
    (trial,) = [trial for trial in trials if trial.candidate.name == "other"]
    assert trial.not_run == "it is for the platform 'elsewhere', this is 'cpu'"
    assert trial.run() == []


def test_a_plugin_in_code_has_no_lightness_trial(trials_of: TrialsOf) -> None:
    (trial,) = trials_of("lightness", SCALE)
    assert trial.not_run == "the plugin was added in code, not from an installed module"


def test_limiting_to_an_op_tests_only_its_kernels(registered: Callable[..., Registry]) -> None:
    trials = conformance(registered(*HEALTHY), DEVICE, op="scale")
    kinds: set[str] = {trial.aspect for trial in trials}
    assert not kinds & {"records", "lightness", "layer", "scheme"}
