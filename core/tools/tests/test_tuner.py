"""Tuning a plan made in code: what is timed, what is kept, and what is chosen afterwards."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typer

import interposer_tools
from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionEntry,
    AttentionSpec,
    Capability,
    Case,
    Choice,
    Config,
    Device,
    Dims,
    Kernel,
    KVCacheLayout,
    LayerEntry,
    OpEntry,
    Placement,
    Platform,
    PlatformEntry,
    PluggableLayer,
    Registry,
    Request,
    Resolver,
    Site,
    Verdict,
    custom_op,
    register,
    use,
)
from interposer.errors import ConfigError
from interposer.hookspecs import hookimpl
from interposer.tooling import Plugins, default_store
from interposer_tools import Table
from interposer_tools._commands.tune import tune as command_tune

DEVICE = Device("bench", "cpu", "a bench", Capability("any", caches_bytes={"l1": 4096}))
SPEC = AttentionSpec(
    num_heads=2,
    num_kv_heads=1,
    head_size=8,
    dtype=torch.float32,
    cache_dtype=torch.float32,
    page_size=16,
    scale=1.0,
)


class FakeTimer:
    """A timer that advances only when the code under test says that it has worked."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


TIMER = FakeTimer()
tune = partial(interposer_tools.tune, timer=TIMER)
SLOW_SECONDS, REFERENCE_SECONDS, FAST_SECONDS = 3.0, 2.0, 1.0
UNTIMED_SECONDS = 1000.0  # work that must not be part of a measurement


class Bench(Platform):
    name = "bench"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Verdict:
        return Verdict.accept()

    def devices(self) -> Sequence[Device]:
        return [DEVICE]

    def capability(self, device: str) -> Capability:
        return DEVICE.capability

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        return [torch.float32]

    def synchronize(self, device: str) -> None:
        pass


def scale_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    yield Case("two rows", {"x": torch.ones(2, 4).to(dtype), "weight": torch.ones(4).to(dtype)})


def scale_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    width = int(dims["width"])
    x = torch.full((num_tokens, width), 1.0 + seed, dtype=dtype)
    arguments = {"x": x, "weight": torch.ones(width)}
    return Case(f"{num_tokens} tokens", arguments, dims)


@custom_op("scale", cases=scale_cases, constants=("weight",), sample=scale_sample)
def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x * weight``."""
    TIMER.advance(REFERENCE_SECONDS)
    return x * weight


@custom_op("unsampled", cases=scale_cases)
def unsampled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x + weight``."""
    return x + weight


def slow(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    TIMER.advance(SLOW_SECONDS)
    return x * weight


def fast(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    TIMER.advance(FAST_SECONDS)
    return x * weight


def proportional(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Take a second per token."""
    TIMER.advance(float(len(x)))
    return x * weight


remembered: dict[int, torch.Tensor] = {}


def replaying(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return an earlier result for the same memory, which takes no time."""
    if x.data_ptr() not in remembered:
        TIMER.advance(SLOW_SECONDS)
        remembered[x.data_ptr()] = x * weight
    return remembered[x.data_ptr()].clone()


uneven_seconds = itertools.cycle((FAST_SECONDS / 2, FAST_SECONDS / 2, SLOW_SECONDS))


def uneven(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Take longer in every third call."""
    TIMER.advance(next(uneven_seconds))
    return x * weight


def transposed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    assert weight.shape == (x.shape[1], 1), "it wants its weight prepared"
    TIMER.advance(FAST_SECONDS)
    return x * weight.T[0]


preparations: list[Mapping[str, Any]] = []


def prepare(**constants: torch.Tensor) -> dict[str, torch.Tensor]:
    preparations.append(constants)
    TIMER.advance(UNTIMED_SECONDS)
    return {"weight": constants["weight"][:, None]}


@custom_op("crowded", cases=scale_cases, sample=scale_sample)
def crowded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Ask for more than there is."""
    raise MemoryError("cannot allocate 4 TiB\nbacktrace:\n  frame 0")


def failing(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such instruction")


def flaky(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Fail after a while, once there are more tokens."""
    runs.append(len(x))
    TIMER.advance(FAST_SECONDS)
    if len(runs) > 8:
        raise SystemExit("enough")
    return x * weight


runs: list[int] = []


def wrong(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight + 1


class Layer(PluggableLayer):
    layer_id = "scaling"

    def __init__(self, site: Site, width: int) -> None:
        super().__init__(site)
        self.bound = site.bind_kernel(scale, width=width)


class Paged(AttentionBackend):
    """A backend whose calls take ``seconds``."""

    seconds = FAST_SECONDS

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self.planned: list[AttentionBatch] = []

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        return Verdict.accept()

    def kv_layout(self) -> KVCacheLayout:
        page = (2, self.spec.page_size, self.spec.num_kv_heads, self.spec.head_size)
        return KVCacheLayout(page, 1, (0, 1, 2, 3, 4), self.spec.cache_dtype)

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        TIMER.advance(UNTIMED_SECONDS)
        return batch

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: AttentionBatch,
        *,
        stored: bool = False,
    ) -> torch.Tensor:
        assert stored == (self.spec.type == "encoder_decoder")
        assert not cache.isnan().any()
        assert int(plan.slots.max()) < cache.shape[1] * self.spec.page_size
        TIMER.advance(self.seconds)
        return query


class SlowPaged(Paged):
    seconds = SLOW_SECONDS


class BindingPaged(Paged):
    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        site.bind_kernel(scale, width=24)


@dataclass
class Plan:
    resolver: Resolver
    placement: Placement
    path: Path


MakePlan = Callable[..., Plan]


def kernel(name: str, function: str, score: float, **more: Any) -> Kernel:
    return Kernel("scale", name, f"acme_scale:{function}", score=score, **more)


SLOW, FAST = kernel("scale_slow", "slow", 50.0), kernel("scale_fast", "fast", 1.0)
ATTENTION = (
    AttentionEntry("slow", "acme_scale:SlowPaged", score=50.0),
    AttentionEntry("quick", "acme_scale:Paged", score=1.0),
)


@pytest.fixture
def make_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    """Return a maker of plans with the given records, as a loader would make them."""
    monkeypatch.setitem(sys.modules, "acme_scale", sys.modules[__name__])
    preparations.clear()
    runs.clear()
    remembered.clear()

    def make(
        *records: Any,
        build: Callable[[Site], object] = lambda site: Layer(site, 16),
        hooks: Mapping[str, Callable[..., object]] | None = None,
        **config: Any,
    ) -> Plan:
        plugin = ModuleType("acme")
        standard = (
            PlatformEntry("bench", "acme_scale:Bench"),
            OpEntry("scale", "acme_scale:scale"),
            OpEntry("unsampled", "acme_scale:unsampled"),
            LayerEntry("scaling", "standard", "acme_scale:Layer", score=0.0),
        )
        plugin.interposer_records = hookimpl(lambda: [*standard, *records])  # type: ignore[attr-defined]
        for name, hook in (hooks or {}).items():
            setattr(plugin, name, hookimpl(hook))
        registry = Registry(Plugins.of(plugin))
        assert registry.plugins.failed == []
        (candidate,) = registry.candidates("platform")
        placement = Placement(
            Bench(), DEVICE, Choice(Request("platform", ""), candidate, "the only one", ())
        )
        policy = Config(**{"cache_dir": str(tmp_path), **config})
        resolver = Resolver(registry, DEVICE, policy, trusted=frozenset({"acme"}))
        build(Site(resolver, "model", torch.float32))
        return Plan(resolver, placement, tmp_path)

    return make


def choice_of(plan: Plan, kind: str, name: str) -> Choice:
    (found,) = [
        choice
        for choice, _ in plan.resolver.choices.values()
        if (choice.request.kind, choice.request.name) == (kind, name)
    ]
    return found


def test_a_kernel_that_remembers_results_is_not_measured(make_plan: MakePlan) -> None:
    plan = make_plan(SLOW, kernel("scale_replaying", "replaying", 1.0), canary="off")
    (entry,) = tune(plan, tokens=(1, 4), repeats=3).entries
    assert entry.value.candidates.keys() == {"acme/reference", "acme/scale_slow"}
    assert "returned a wrong result" in entry.value.failed["acme/scale_replaying"][1]


def test_tuning_corrects_wrong_scores_of_kernels(make_plan: MakePlan) -> None:
    before = choice_of(make_plan(SLOW, FAST), "kernel", "scale")
    assert (before.chosen.name, before.seconds) == ("scale_slow", {})
    tune(make_plan(SLOW, FAST), tokens=(1, 4), repeats=3)
    after = choice_of(make_plan(SLOW, FAST), "kernel", "scale")
    assert after.chosen.name == "scale_fast"
    assert after.seconds == pytest.approx(
        {
            "acme/scale_slow": SLOW_SECONDS,
            "acme/scale_fast": FAST_SECONDS,
            "acme/reference": REFERENCE_SECONDS,
        }
    )
    assert "in the measurements of this host" in after.why
    (refusal,) = [r for r in after.refusals if r.candidate == "scale_slow"]
    assert "slower" in refusal.reason


def test_pins_and_tables_off_override_measurements(make_plan: MakePlan) -> None:
    tune(make_plan(SLOW, FAST), tokens=(1,), repeats=3)
    for policy in ({"kernels": {"scale": "scale_slow"}}, {"tables": False}):
        chosen = choice_of(make_plan(SLOW, FAST, **policy), "kernel", "scale").chosen
        assert chosen.name == "scale_slow"


def test_pinned_and_forbidden_candidates_are_timed_too(make_plan: MakePlan) -> None:
    rule = {"pin": "scale_slow", "forbid": ["scale_fast"]}
    table = tune(make_plan(SLOW, FAST, kernels={"scale": rule}), tokens=(1,), repeats=3)
    (entry,) = table.entries
    assert len(entry.value.candidates) == 3


def test_measurements_cover_each_number_of_tokens(make_plan: MakePlan) -> None:
    record = kernel("scale_proportional", "proportional", 1.0)
    (entry,) = tune(make_plan(record), tokens=(16, 1, 4, 4), repeats=3).entries
    reference = entry.value.candidates["acme/reference"]
    assert reference.per_tokens == {"1": 2.0, "4": 2.0, "16": 2.0}
    proportional = entry.value.candidates["acme/scale_proportional"]
    assert proportional.per_tokens == {"1": 1.0, "4": 4.0, "16": 16.0}
    assert proportional.seconds == pytest.approx(4.0)
    assert (proportional.low, proportional.high) == pytest.approx((4.0, 4.0))
    assert entry.key.dims == {"width": 16}
    assert (entry.key.device, entry.key.platform, entry.key.dtype) == (
        "a bench",
        "bench",
        "float32",
    )


def test_constants_are_prepared_once_and_not_timed(make_plan: MakePlan) -> None:
    record = kernel("scale_transposed", "transposed", 9.0, prepare="acme_scale:prepare")
    (entry,) = tune(make_plan(record), tokens=(1, 4, 16), repeats=3).entries
    assert len(preparations) == 1
    seconds = entry.value.candidates["acme/scale_transposed"].seconds
    assert seconds == pytest.approx(FAST_SECONDS)
    assert entry.value.failed == {}


def test_a_failed_candidate_is_recorded_and_others_are_timed(make_plan: MakePlan) -> None:
    records = (kernel("scale_failing", "failing", 99.0), SLOW, FAST)
    (entry,) = tune(make_plan(*records), tokens=(1,), repeats=3).entries
    version, reason = entry.value.failed["acme/scale_failing"]
    assert "no such instruction" in reason
    assert version == "in code"
    after = choice_of(make_plan(*records), "kernel", "scale")
    assert after.chosen.name == "scale_fast"
    assert after.notes == ()


def test_a_candidate_that_fails_later_does_not_affect_others(make_plan: MakePlan) -> None:
    plan = make_plan(kernel("scale_flaky", "flaky", 99.0), FAST)
    (entry,) = tune(plan, tokens=(1, 4), repeats=3).entries
    assert runs[-1] == 4
    assert set(entry.value.candidates) == {"acme/reference", "acme/scale_fast"}
    assert all(len(f.per_tokens) == 2 for f in entry.value.candidates.values())
    assert "enough" in entry.value.failed["acme/scale_flaky"][1]


def test_a_request_whose_candidates_all_fail_is_an_error(
    make_plan: MakePlan,
    make_plugin: Callable[..., ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command(plan: Plan) -> None:
        planner = make_plugin("planner", interposer_plan=lambda: plan)
        with register(planner), use(plugins="none", isolation="off"):
            command_tune(tmp_path, tokens="1", repeats=3)

    def build(site: Site) -> None:
        site.bind_kernel(crowded, width=16)

    command(make_plan(kernel("scale_failing", "failing", 99.0)))
    assert "scale_failing: failed: raised RuntimeError" in capsys.readouterr().out
    with pytest.raises(typer.Exit) as ended:
        command(make_plan(OpEntry("crowded", "acme_scale:crowded"), build=build))
    assert ended.value.exit_code == 1
    out, err = capsys.readouterr()
    assert "reference: failed: raised MemoryError('cannot allocate 4 TiB ...\n" in out
    assert err.startswith("error: every candidate failed for kernel 'crowded' [")


def test_scattered_times_are_marked_with_a_warning(
    make_plan: MakePlan,
    make_plugin: Callable[..., ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("interposer_tools._tuner.tuner.tune", tune)

    def command(plan: Plan, as_json: bool = False) -> tuple[str, str]:
        planner = make_plugin("planner", interposer_plan=lambda: plan)
        with register(planner), use(plugins="none", isolation="off"):
            command_tune(tmp_path, tokens="1", repeats=3, as_json=as_json)
        return capsys.readouterr()

    out, err = command(make_plan(FAST))
    assert "scattered" not in out
    assert err == ""
    plan = make_plan(FAST, kernel("scale_uneven", "uneven", 1.0))
    out, err = command(plan)
    assert "  acme/scale_uneven: 500 ms (500 ms to 1.75 s), scattered\n" in out
    assert "  acme/scale_fast: 1 s (1 s to 1 s)\n" in out
    assert err.startswith("warning: the times of 1 of 1 measurement are scattered")
    assert "scale_uneven" in err
    assert "Try: tune again while the machine does nothing else" in err
    facts = json.loads(command(plan, as_json=True)[0])
    assert facts["scattered"] == [str(tune(plan, tokens=(1,), repeats=3).entries[0].key)]


def test_a_wrong_model_argument_is_named_by_its_type(make_plan: MakePlan) -> None:
    with pytest.raises(ConfigError, match="model is of the type Placement, must be") as caught:
        tune(make_plan().placement)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_candidates_that_fail_the_canary_are_not_timed(make_plan: MakePlan) -> None:
    records = (kernel("scale_wrong", "wrong", 99.0), FAST)
    (entry,) = tune(make_plan(*records, canary="all"), tokens=(1,), repeats=3).entries
    assert set(entry.value.candidates) == {"acme/reference", "acme/scale_fast"}
    assert "reference of 'scale'" in entry.value.failed["acme/scale_wrong"][1]


def test_requests_that_cannot_be_timed_are_listed_with_the_reason(make_plan: MakePlan) -> None:
    def build(site: Site) -> None:
        Layer(site, 16)
        site.bind(unsampled)

    table = tune(make_plan(build=build), tokens=(1,), repeats=3)
    reasons = {missing.request.split("'")[1]: missing.reason for missing in table.not_measured}
    assert set(reasons) == {"scaling", "unsampled"}
    assert "no sample" in reasons["unsampled"]
    assert "selected by configuration" in reasons["scaling"]


@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
def test_tuning_corrects_wrong_scores_of_attention(make_plan: MakePlan, kind: Any) -> None:
    def build(site: Site) -> None:
        site.resolver.attention(replace(SPEC, type=kind), site)

    assert choice_of(make_plan(*ATTENTION, build=build), "attention", kind).chosen.name == "slow"
    (entry,) = tune(make_plan(*ATTENTION, build=build), tokens=(1, 40), repeats=3).entries
    assert entry.key.kind == "attention"
    seconds = {name: figures.seconds for name, figures in entry.value.candidates.items()}
    expected = {"acme/slow": SLOW_SECONDS, "acme/quick": FAST_SECONDS}  # without ``plan``
    assert seconds == pytest.approx(expected)
    after = choice_of(make_plan(*ATTENTION, build=build), "attention", kind)
    assert after.chosen.name == "quick"
    assert "fastest" in after.why


def test_kernels_of_every_backend_are_timed(make_plan: MakePlan) -> None:
    binding = AttentionEntry("binding", "acme_scale:BindingPaged", score=0.5)

    def build(site: Site) -> None:
        site.resolver.attention(SPEC, site)

    table = tune(make_plan(SLOW, *ATTENTION, binding, build=build), tokens=(1,), repeats=3)
    assert [(e.key.kind, e.key.name) for e in table.entries] == [
        ("kernel", "scale"),
        ("attention", "decoder"),
    ]
    assert set(table.entries[1].value.candidates) == {"acme/slow", "acme/quick", "acme/binding"}


def test_requests_are_timed_once(make_plan: MakePlan) -> None:
    def build(site: Site) -> None:
        for name in ("one", "two"):
            Layer(site.at(name), 16)
        Layer(site.at("three"), 32)

    rules = {"scale@*two": "reference"}
    table = tune(make_plan(SLOW, build=build, kernels=rules), tokens=(1,), repeats=3)
    assert [entry.key.dims for entry in table.entries] == [{"width": 16}, {"width": 32}]


def test_progress_and_observers_are_called(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int, str]] = []
    finished: list[tuple[str, str, int, int, object]] = []

    def interposer_finished(
        activity: str, subject: str, start_ns: int, end_ns: int, facts: Mapping[str, object]
    ) -> None:
        if activity == "tune":
            finished.append((activity, subject, start_ns, end_ns, facts["candidates"]))

    plan = make_plan(SLOW, hooks={"interposer_finished": interposer_finished})
    readings = iter((5, 7, 11))  # of the wall clock: a kernel is timed, a layer is not
    wall_clock = SimpleNamespace(time_ns=lambda: next(readings))
    monkeypatch.setattr("interposer_tools._tuner.tuner.time", wall_clock)
    tune(plan, tokens=(1,), repeats=3, progress=lambda *facts: calls.append(facts))
    # The layer is a request as well.
    assert [(num_done, total) for num_done, total, _ in calls] == [(0, 2), (1, 2), (2, 2)]
    assert "scale" in calls[0][2]
    assert finished == [("tune", calls[0][2], 5, 7, 2)]


def test_the_returned_table_is_stored(make_plan: MakePlan) -> None:
    plan = make_plan(SLOW, FAST)
    table = tune(plan, tokens=(1,), repeats=3)
    assert Table.stored(default_store(plan.resolver.config)).entries == table.entries


@pytest.mark.parametrize("tokens", [(), (0,), (1.5,), ("1",), 3, "16", None, (True,)])
def test_tokens_that_cannot_be_used_raise(make_plan: MakePlan, tokens: Any) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        tune(make_plan(), tokens=tokens)


@pytest.mark.parametrize("repeats", [0, 2, 3.5])
def test_too_few_repeats_raise(make_plan: MakePlan, repeats: Any) -> None:
    with pytest.raises(ConfigError, match="repeats"):
        tune(make_plan(), tokens=(1,), repeats=repeats)


def test_a_described_device_is_not_measured(make_plan: MakePlan) -> None:
    plan = make_plan(SLOW)
    plan.resolver.described = True
    with pytest.raises(ConfigError, match="only described"):
        tune(plan, tokens=(1,))
