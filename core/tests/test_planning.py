"""A model directory is planned by the plugin that can read it; a model is its own plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from interposer import Capability, Config, Device, Placement, explain, planned, register
from interposer._plugins.plugins import PluginWarning
from interposer._selection.placement import Planned
from interposer.errors import CheckpointError, ConfigError

Make = Callable[..., ModuleType]


@dataclass
class Plan:
    path: Path
    resolver: Any = None
    placement: Any = None
    asked: dict[str, Any] = field(default_factory=dict)


def reader(suffix: str) -> Callable[..., Plan | None]:
    def interposer_plan(path: Path, config: Config, dtype: str, placement: object) -> Plan | None:
        if path.suffix != suffix:
            return None
        return Plan(path, asked={"config": config, "dtype": dtype, "placement": placement})

    return interposer_plan


def test_the_plugin_that_reads_the_directory_plans_it(make_plugin: Make) -> None:
    plugin = make_plugin("one", interposer_plan=reader(".one"))
    two = make_plugin("two", interposer_plan=reader(".two"))
    config = Config(kernels={"linear": "reference"})
    with register(plugin), register(two):
        plan = planned("model.two", config, "float32")
    assert isinstance(plan, Plan)
    assert plan.path == Path("model.two")
    assert plan.asked["config"].kernels == config.kernels
    assert (plan.asked["dtype"], plan.asked["placement"]) == ("float32", None)


def test_a_model_is_its_own_plan_and_planned_anew_for_another_placement(make_plugin: Make) -> None:
    model = Plan(Path("model.one"))
    assert isinstance(model, Planned)
    assert planned(model) is model
    device = Device("far", "cpu", "far away", Capability("any"))
    elsewhere = Placement(None, device, None, described=True)  # type: ignore[arg-type]
    with register(make_plugin("one", interposer_plan=reader(".one"))):
        again = planned(model, placement=elsewhere)
    assert isinstance(again, Plan)
    assert again.asked["placement"] is elsewhere


def test_a_plugin_without_the_quantization_argument_is_skipped(make_plugin: Make) -> None:
    def interposer_plan(path: Path, quantization: Any) -> Plan:
        return Plan(path, asked={"quantization": quantization})

    a = make_plugin("a", interposer_plan=reader(".one"))
    with register(a):
        with pytest.raises(
            ConfigError, match=r"reads the .*'model\.one' and quantizes it by 'fp8'"
        ):
            planned("model.one", Config(disable={"engine"}), quantization="fp8")
        with register(make_plugin("b", interposer_plan=interposer_plan)):
            plan = planned("model.one", quantization="fp8")
            plain = planned("model.one")
    assert isinstance(plan, Plan)
    assert isinstance(plain, Plan)
    assert plan.asked == {"quantization": "fp8"}
    assert "dtype" in plain.asked


def test_a_model_is_planned_anew_with_its_own_quantization(make_plugin: Make) -> None:
    def interposer_plan(path: Path, quantization: Any) -> Plan:
        return Plan(path, asked={"quantization": quantization})

    model = Plan(Path("model.one"))
    model.quantization = "fp8"  # type: ignore[attr-defined]
    elsewhere = Placement(None, Device("far", "cpu", "", Capability("any")), None)  # type: ignore[arg-type]
    with register(make_plugin("one", interposer_plan=interposer_plan)):
        again = planned(model, placement=elsewhere)
        second_plan = planned(model, placement=elsewhere, quantization="int8")
    assert isinstance(again, Plan)
    assert isinstance(second_plan, Plan)
    assert (again.asked["quantization"], second_plan.asked["quantization"]) == ("fp8", "int8")


def test_only_plugins_with_the_rank_arguments_plan_ranks(make_plugin: Make) -> None:
    def interposer_plan(path: Path, tensor_parallel: int | None) -> Plan:
        return Plan(path, asked={"tensor_parallel": tensor_parallel})

    ours = make_plugin("b", interposer_plan=interposer_plan)
    with register(make_plugin("a", interposer_plan=reader(".one"))), register(ours):
        plan = planned("model.one", tensor_parallel=2)
    assert isinstance(plan, Plan)
    assert plan.asked == {"tensor_parallel": 2}


def test_ranks_without_a_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Try: explain\(path, tensor_parallel="):
        explain(tensor_parallel=2)


def test_an_error_of_the_planner_is_passed_on_without_quarantine(make_plugin: Make) -> None:
    def interposer_plan(path: Path) -> None:
        raise CheckpointError(path, "no config.json")

    with register(make_plugin("one", interposer_plan=interposer_plan)) as registration:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"no config\.json"):
                planned("model.one")
        assert registration.source.name == "one"


def test_without_a_planner_the_error_names_the_package_to_install() -> None:
    with pytest.raises(ConfigError, match="pip install --find-links dist interposer-engine"):
        planned("model.one", Config(disable={"engine"}))


@pytest.mark.parametrize("nonsense", [3, None, object()])
def test_an_argument_that_is_no_model_is_refused(nonsense: Any) -> None:
    with pytest.raises(ConfigError, match="neither a model directory nor a model"):
        planned(nonsense)


def test_a_planner_that_fails_is_quarantined_and_the_next_is_called(make_plugin: Make) -> None:
    def interposer_plan(path: Path) -> None:
        raise SystemExit(3)

    broken = make_plugin("a_broken", interposer_plan=interposer_plan)
    with register(broken), register(make_plugin("one", interposer_plan=reader(".one"))):
        with pytest.warns(PluginWarning, match=r"its hook interposer_plan raised SystemExit\(3\)"):
            assert isinstance(planned("model.one"), Plan)
        assert isinstance(planned("model.one"), Plan)


def test_an_invalid_plan_names_its_plugin(make_plugin: Make) -> None:
    vague = make_plugin("vague", interposer_plan=lambda path: "a plan")
    with register(vague), pytest.raises(ConfigError, match=r"'vague' planned 'model\.one' as str"):
        planned("model.one")
