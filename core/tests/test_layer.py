"""A layer is built as the class that the selection chose, wherever the model names the standard."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from interposer import (
    Capability,
    Config,
    Device,
    LayerEntry,
    PluggableLayer,
    Registry,
    Resolver,
    Site,
    explain,
)
from interposer._contract.layer import check_replacement
from interposer.errors import RecordError

DEVICE = Device("host", "cpu", "a device", Capability("any"))
Build = Callable[..., Site]


class Scale(PluggableLayer):
    layer_id = "scale"

    def __init__(self, site: Site, size: int, factor: float = 2.0) -> None:
        super().__init__(site)
        self.dtype = site.dtype
        self.weight = nn.Parameter(torch.full((size,), factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Negated(Scale):
    def __init__(self, site: Site, size: int, factor: float = 2.0) -> None:
        super().__init__(site, size, -factor)
        self.note = "built by the replacement"


class Renamed(Scale):
    """Repeats the id, which asks the selection again where it is built directly."""

    layer_id = "scale"


class Stranger(nn.Module):
    pass


class Wider(Scale):
    def __init__(self, site: Site, size: int, factor: float = 2.0, bias: bool = False) -> None:
        super().__init__(site, size, factor)


class OtherDefault(Scale):
    def __init__(self, site: Site, size: int, factor: float = 3.0) -> None:
        super().__init__(site, size, factor)


class OtherName(Scale):
    def __init__(self, site: Site, width: int, factor: float = 2.0) -> None:
        super().__init__(site, width, factor)


def entry(kind: type, score: float = 10.0) -> LayerEntry:
    return LayerEntry("scale", kind.__name__.lower(), f"{__name__}:{kind.__name__}", score=score)


@pytest.fixture
def build(registered: Callable[..., Registry]) -> Build:
    """Return a maker of sites that know the standard layer and the given replacements."""

    def site(*replacements: LayerEntry, config: Config | None = None, prefix: str = "") -> Site:
        registry = registered(entry(Scale, 0.0), *replacements)
        return Site(Resolver(registry, DEVICE, config or Config()), prefix, torch.float32)

    return site


def test_the_standard_layer_is_built_where_nothing_replaces_it(build: Build) -> None:
    layer = Scale(build(prefix="a"), 3)
    assert type(layer) is Scale
    assert layer.prefix == "a"
    assert torch.equal(layer(torch.ones(3)), torch.full((3,), 2.0))


def test_the_replacement_is_built_with_the_same_arguments_by_its_own_init(build: Build) -> None:
    layer = Scale(build(entry(Negated)), 3, factor=5.0)
    assert type(layer) is Negated
    assert layer.note == "built by the replacement"
    assert torch.equal(layer(torch.ones(3)), torch.full((3,), -5.0))


def test_site_may_be_a_keyword(build: Build) -> None:
    assert type(Scale(site=build(entry(Negated)), size=3)) is Negated


def test_a_replacement_built_directly_is_not_replaced_again(build: Build) -> None:
    site = build(entry(Negated), entry(Renamed, 20.0))
    assert type(Negated(site, 3)) is Negated
    assert site.resolver.choices == {}
    assert type(Scale(site, 3)) is Renamed


def test_a_pin_decides_at_the_places_it_names(build: Build) -> None:
    config = Config(layers={"scale@layers.0.*": "scale"})
    site = build(entry(Negated), config=config, prefix="layers")
    assert type(Scale(site.at("0").at("norm"), 3)) is Scale
    assert type(Scale(site.at("1").at("norm"), 3)) is Negated


@pytest.mark.parametrize("make", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("replacements", [(), (entry(Negated),)])
def test_copies_keep_class_and_weights(
    make: Callable[[Any], Any], replacements: tuple[LayerEntry, ...], build: Build
) -> None:
    layer = Scale(build(*replacements), 3)
    copied = make(layer)
    assert type(copied) is type(layer)
    assert copied.prefix == layer.prefix
    assert torch.equal(copied.weight, layer.weight)
    assert copied.weight is not layer.weight


def test_the_weights_of_a_replacement_are_saved_and_loaded_as_usual(build: Build) -> None:
    source, target = Scale(build(entry(Negated)), 3, 7.0), Scale(build(), 3)
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight, source.weight)


@pytest.mark.parametrize("wrong", [Wider, OtherDefault, OtherName])
def test_a_replacement_with_another_signature_is_refused(wrong: type, build: Build) -> None:
    site = build(entry(wrong))
    assert type(Scale(site, 3)) is Scale
    ((choice, _),) = site.resolver.choices.values()
    (refusal,) = choice.refusals
    assert refusal.reason.startswith(f"layer 'acme/{wrong.__name__.lower()}' takes (self, site")
    assert "but Scale takes (self, site" in refusal.reason


@pytest.mark.parametrize("wrong", [Stranger, torch.relu, 3])
def test_a_replacement_must_be_a_subclass(wrong: object) -> None:
    with pytest.raises(RecordError, match="does not subclass Scale"):
        check_replacement(Scale, wrong, "acme/wrong")
    check_replacement(Scale, Scale, "acme/right")


def test_a_replacement_that_cannot_be_imported_is_refused(build: Build) -> None:
    site = build(LayerEntry("scale", "gone", "acme_of_nowhere.layers:Scale"))
    assert type(Scale(site, 3)) is Scale
    assert "'acme_of_nowhere.layers:Scale' cannot be loaded" in str(explain(site).all())


def test_a_nested_site_has_a_dotted_prefix(build: Build) -> None:
    assert build().at("layers").at("0").prefix == "layers.0"
    assert build(prefix="model").at("norm").prefix == "model.norm"


def test_finalizing_the_standard_layer_changes_nothing(build: Build) -> None:
    layer = Scale(build(), 3)
    before = layer.weight.clone()
    layer.finalize()
    assert torch.equal(layer.weight, before)
