"""The resolver asks once per distinct request and remembers it; what it binds is bare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interposer import (
    AttentionBackend,
    AttentionEntry,
    AttentionSpec,
    Capability,
    Case,
    Choice,
    Config,
    Device,
    Kernel,
    ModelEntry,
    OpEntry,
    Registry,
    Request,
    Requires,
    Resolver,
    Rule,
    SchemeEntry,
    Site,
    Verdict,
    custom_op,
    explain,
)
from interposer._plugins.plugins import PluginWarning
from interposer.errors import ConfigError, NoCandidateError, UnknownNameError

DEVICE = Device("host", "cpu", "a device", Capability("any"))
Resolve = Callable[..., Resolver]


def no_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    yield from ()


@custom_op("double", cases=no_cases)
def double(x: torch.Tensor) -> torch.Tensor:
    """Return ``2 x``."""
    return x + x


def double_fast(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def prepared(**constants: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return constants


OP = OpEntry("double", f"{__name__}:double")
FAST = Kernel(
    "double",
    "double_fast",
    f"{__name__}:double_fast",
    prepare=f"{__name__}:prepared",
    requires=Requires(dtypes=("float32",)),
)


@pytest.fixture
def resolve(registered: Callable[..., Registry]) -> Resolve:
    """Return a maker of resolvers for the given records, configuration and observers."""

    def make(*records: object, config: Config | None = None, **hooks: object) -> Resolver:
        return Resolver(registered(*records, **hooks), DEVICE, config or Config())

    return make


def site(resolver: Resolver, dtype: torch.dtype = torch.float32) -> Site:
    return Site(resolver, "a", dtype)


def test_the_bound_kernel_is_the_function_itself(resolve: Resolve) -> None:
    resolver = resolve(OP, FAST)
    bound_kernel = site(resolver).bind_kernel(double)
    assert bound_kernel.function is double_fast
    assert bound_kernel.prepare is prepared
    assert bound_kernel.choice.chosen.name == "double_fast"
    assert site(resolver).bind(double) is double_fast


def test_the_reference_is_bound_if_every_kernel_refuses(resolve: Resolve) -> None:
    bound_kernel = site(resolve(OP, FAST), torch.float16).bind_kernel(double)
    assert bound_kernel.function is double.reference
    assert bound_kernel.prepare is None
    assert "needs dtype float32, got float16" in str(bound_kernel.choice.refusals[0])


def test_preferences_of_the_user_rank_before_the_platform(
    registered: Callable[..., Registry],
) -> None:
    slow = Kernel("double", "double_slow", f"{__name__}:double_fast", score=1.0)

    def why(**config: Any) -> tuple[str, str]:
        resolver_config = Config(kernels=config, strict=True)
        defaults = {"double": "double_slow", "triple": "triple_slow"}
        resolver = Resolver(registered(OP, FAST, slow), DEVICE, resolver_config, defaults=defaults)
        choice = site(resolver).bind_kernel(double).choice
        return choice.chosen.name, choice.why

    assert why() == ("double_slow", "preferred by the platform")
    assert why(**{"*": Rule(forbid=("reference",))}) == why()
    assert why(**{"*": Rule(prefer=("*fast",))}) == (
        "double_fast",
        "preferred by the configuration",
    )
    assert why(double="reference") == ("reference", "pinned by the configuration")


def test_a_default_that_refuses_is_no_unmet_preference(
    registered: Callable[..., Registry],
) -> None:
    resolver = Resolver(
        registered(OP, FAST), DEVICE, Config(strict=True), defaults={"double": "double_gone"}
    )
    choice = site(resolver).bind_kernel(double).choice
    assert (choice.chosen.name, choice.notes) == ("double_fast", ())


def test_equal_requests_share_one_choice_and_keep_their_places(resolve: Resolve) -> None:
    resolver = resolve(OP, FAST)
    place = site(resolver)
    for name in ("0", "1"):
        place.at(name).bind(double, size=1)
    place.bind(double, size=2)
    dims_and_places = [(dict(c.request.dims), places) for c, places in resolver.choices.values()]
    assert dims_and_places == [({"size": 1}, ["a.0", "a.1"]), ({"size": 2}, ["a"])]


def test_a_choice_may_be_annotated_after_it_was_made(resolve: Resolve) -> None:
    resolver = resolve(OP, FAST)
    place = site(resolver)
    place.at("0").bind(double)
    (key,) = resolver.choices
    resolver.annotate(key, "first")
    resolver.annotate(key, "second", idle=True)
    resolver.notes.append("of the model")
    assert place.at("1").bind(double) is double_fast
    explained = explain(SimpleNamespace(resolver=resolver))
    (row,) = explained.rows
    assert (row.choice.notes, row.choice.idle) == (("first", "second"), True)
    assert row.prefixes == ("a.0", "a.1")
    assert explained.notes == ("of the model",)


def test_a_pin_at_one_place_makes_a_separate_choice(resolve: Resolve) -> None:
    resolver = resolve(OP, FAST, config=Config(kernels={"double@a.1": "reference"}))
    place = site(resolver)
    assert place.at("0").bind(double) is double_fast
    assert place.at("1").bind(double) is double.reference
    assert place.at("2").bind(double) is double_fast
    assert [places for _, places in resolver.choices.values()] == [["a.0", "a.2"], ["a.1"]]


def test_a_pin_whose_glob_matches_no_place_is_named_with_the_places(resolve: Resolve) -> None:
    pins = {"double@a.*": "reference", "double@b.*": "reference", "double": "double_fast"}
    resolver = resolve(OP, FAST, config=Config(kernels=pins))
    site(resolver).at("1").bind(double)
    with pytest.raises(ConfigError, match=r"'double@b\.\*' matches no place .*first: 'a\.1'"):
        resolver.check_places()
    Site(resolver, "b.1", torch.float32).bind(double)
    resolver.check_places()


def test_a_pin_on_an_unknown_op_raises_before_anything_is_built(resolve: Resolve) -> None:
    with pytest.raises(UnknownNameError, match=r"op 'duoble' in Config.kernels"):
        resolve(OP, config=Config(kernels={"duoble": "reference"}))


def test_an_op_that_is_not_installed_raises(resolve: Resolve) -> None:
    with pytest.raises(UnknownNameError, match="Unknown op 'double'"):
        site(resolve()).bind(double)


@pytest.mark.parametrize("field", ["target", "prepare"])
@pytest.mark.parametrize("missing", ["acme_of_nowhere:fast", "math:fast"])
def test_a_kernel_with_a_missing_target_is_refused_and_raises_if_pinned(
    field: str, missing: str, resolve: Resolve
) -> None:
    fields: dict[str, Any] = {"target": "math:tau", field: missing}
    kernel = Kernel("double", "double_gone", **fields)
    bound_kernel = site(resolve(OP, kernel)).bind_kernel(double)
    assert bound_kernel.function is double.reference
    (refusal,) = bound_kernel.choice.refusals
    assert refusal.reason.startswith(f"loading {missing} raised ")
    assert "Traceback" in refusal.traceback
    pinned = resolve(OP, kernel, config=Config(kernels={"double": "double_gone"}))
    with pytest.raises(NoCandidateError, match=f"loading {missing} raised"):
        site(pinned).bind(double)


ASKED: list[Request] = []


def confirmed(request: Request) -> Verdict:
    ASKED.append(request)
    return Verdict.accept() if request.dtype == "float32" else Verdict.refuse("not today")


def failing(request: Request) -> Verdict:
    raise OSError("its library is broken")


def test_confirm_is_called_for_a_kernel_that_would_be_chosen(resolve: Resolve) -> None:
    ASKED.clear()
    slow = Kernel(
        "double", "double_slow", f"{__name__}:double_fast", confirm=f"{__name__}:confirmed"
    )
    resolver = resolve(OP, slow)
    bound_kernel = site(resolver).bind_kernel(double)
    assert bound_kernel.choice.chosen.name == "double_slow"
    assert [(request.name, request.dtype) for request in ASKED] == [("double", "float32")]
    second_kernel = site(resolver, torch.float16).bind_kernel(double)
    assert second_kernel.function is double.reference
    assert second_kernel.choice.refusals[0].reason == "not today"
    pinned = resolve(OP, slow, config=Config(kernels={"double": "double_slow"}))
    with pytest.raises(NoCandidateError, match="not today"):
        site(pinned, torch.float16).bind(double)


def test_confirm_is_not_called_for_outranked_or_described_kernels(resolve: Resolve) -> None:
    ASKED.clear()
    slow = Kernel(
        *("double", "double_slow", f"{__name__}:double_fast"),
        score=-1.0,
        confirm=f"{__name__}:confirmed",
    )
    assert site(resolve(OP, slow)).bind(double) is double.reference
    pin = Config(kernels={"double": "double_slow"})
    registry = resolve(OP, slow).registry
    described = Resolver(registry, DEVICE, pin, described=True)
    assert site(described, torch.float16).bind_kernel(double).choice.chosen.name == "double_slow"
    assert ASKED == []


def test_an_exception_in_confirm_is_a_refusal(resolve: Resolve) -> None:
    broken = Kernel(
        "double", "double_slow", f"{__name__}:double_fast", confirm=f"{__name__}:failing"
    )
    bound_kernel = site(resolve(OP, broken)).bind_kernel(double)
    (refusal,) = bound_kernel.choice.refusals
    assert refusal.reason == "raised OSError('its library is broken')"
    assert "Traceback" in refusal.traceback


def test_observers_see_every_distinct_choice_once(resolve: Resolve) -> None:
    observed: list[Choice] = []
    resolver = resolve(OP, FAST, interposer_selected=lambda choice: observed.append(choice))
    for _ in range(3):
        site(resolver).bind(double)
    assert observed == [choice for choice, _ in resolver.choices.values()]
    assert len(observed) == 1


def test_observers_see_refused_requests(resolve: Resolve) -> None:
    observed: list[NoCandidateError] = []
    config = Config(kernels={"double": "double_fast"})
    resolver = resolve(
        OP, FAST, config=config, interposer_refused=lambda error: observed.append(error)
    )
    with pytest.raises(NoCandidateError) as caught:
        site(resolver, torch.float16).bind(double)
    assert observed == [caught.value]


def test_an_observer_that_raises_does_not_break_the_selection(resolve: Resolve) -> None:
    def watch(choice: Choice) -> None:
        raise RuntimeError("broken on purpose")

    resolver = resolve(OP, FAST, interposer_selected=watch)
    with pytest.warns(PluginWarning, match="its observer interposer_selected raised"):
        assert site(resolver).bind(double) is double_fast
    assert site(resolver, torch.float16).bind(double) is double.reference


def test_a_scheme_with_a_missing_target_is_refused(registered: Callable[..., Registry]) -> None:
    registry = registered(SchemeEntry("gptq", "acme_gptq", "acme_of_nowhere:Gptq"))
    with pytest.raises(NoCandidateError, match="'acme_of_nowhere:Gptq' cannot be loaded"):
        Resolver(registry, DEVICE, Config()).choose_scheme({"quant_method": "gptq"})
    with pytest.raises(UnknownNameError, match=r"quantization method 'gtpq'.* first: 'gptq'"):
        Resolver(registry, DEVICE, Config()).choose_scheme({"quant_method": "gtpq"})


def test_a_family_with_a_missing_target_is_refused(registered: Callable[..., Registry]) -> None:
    registry = registered(ModelEntry(("Gem",), "acme_gem", "acme_of_nowhere:Gem"))
    resolver = Resolver(registry, DEVICE, Config())
    with pytest.raises(NoCandidateError, match="'acme_of_nowhere:Gem' cannot be loaded"):
        resolver.choose_model("Gem", {}, "config.json")
    with pytest.raises(UnknownNameError, match=r"architecture 'Germ'.* first: 'Gem'"):
        resolver.choose_model("Germ", {}, "config.json")


class Backend(AttentionBackend):
    built = 0
    kv_layout = plan = forward = lambda self, *_: None  # type: ignore[assignment]

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        type(self).built += 1

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        return Verdict.refuse("windows") if spec.window_tokens else Verdict.accept()


def spec(**facts: Any) -> AttentionSpec:
    return AttentionSpec(
        num_heads=2,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        cache_dtype=torch.float32,
        page_size=16,
        scale=1.0,
        **facts,
    )


def test_layers_with_equal_specs_share_a_backend(resolve: Resolve) -> None:
    Backend.built = 0
    resolver = resolve(AttentionEntry("paged", f"{__name__}:Backend"))
    first = resolver.attention(spec(), site(resolver))
    assert resolver.attention(spec(), site(resolver).at("b")) is first
    assert resolver.attention(spec(softcap=3.0), site(resolver)) is not first
    assert Backend.built == 2
    with pytest.raises(NoCandidateError, match="windows"):
        resolver.attention(spec(window_tokens=4), site(resolver))


def test_an_attention_type_can_be_pinned(resolve: Resolve) -> None:
    entries = [AttentionEntry(name, f"{__name__}:Backend") for name in ("one", "two")]
    resolver = resolve(*entries, config=Config(attention={"decoder": "two"}))
    resolver.attention(spec(), site(resolver))
    resolver.attention(spec(type="encoder"), site(resolver))
    chosen = [choice.chosen.name for choice, _ in resolver.choices.values()]
    assert chosen == ["two", "one"]
