"""Candidates are judged by platform, requirements and their own code, which may fail."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from interposer import AttentionEntry, Capability, Kernel, Request, Requires, Verdict
from interposer._plugins.acceptance import acceptance_of

REQUEST = Request("kernel", "linear", "host", Capability("x86_64"), "float32")


def even(request: Request) -> Verdict:
    return Verdict.accept() if request.dims.get("n", 0) else Verdict.refuse("n is missing")


def talkative(request: Request) -> Verdict:
    return Verdict.accept("in two passes")


def failing(request: Request) -> Verdict:
    raise OSError("library not found")


def leaving(request: Request) -> Verdict:
    raise SystemExit("wrong version")


def undecided(request: Request) -> bool:
    return True


def kernel(predicate: object = None, **facts: object) -> Kernel:
    target = f"{__name__}:{predicate.__name__}" if predicate else ""  # type: ignore[attr-defined]
    return Kernel("linear", "fast", "acme_of_nowhere:fast", predicate=target, **facts)  # type: ignore[arg-type]


def test_a_kernel_is_judged_without_importing_it() -> None:
    assert acceptance_of(kernel())(REQUEST)
    assert acceptance_of(kernel(platform="host"))(REQUEST)


def test_a_kernel_for_another_platform_is_refused() -> None:
    verdict = acceptance_of(kernel(platform="tpu"))(REQUEST)
    assert verdict.reason == "runs on tpu, the request is for host"


def lending(platform: str) -> tuple[str, ...]:
    return ("", platform, "tpu") if platform == "host" else ("", platform)


def test_a_platform_runs_the_kernels_that_it_states_to_run() -> None:
    judge = acceptance_of(kernel(platform="tpu"), runs=lending)
    assert judge(REQUEST).reason == "made for tpu, whose kernels host can run"
    elsewhere = replace(REQUEST, platform="board")
    assert judge(elsewhere).reason == "runs on tpu, the request is for board"
    for platform in ("", "host"):
        assert acceptance_of(kernel(platform=platform), runs=lending)(REQUEST) == Verdict.accept()


def test_other_requirements_are_judged_by_the_device() -> None:
    needs = Requires(frozenset({"matrix_unit"}))
    judge = acceptance_of(kernel(even, platform="tpu", requires=needs), runs=lending)
    assert judge(REQUEST).reason == "needs matrix_unit, which the device lacks"
    able = replace(REQUEST, capability=Capability("x86_64", frozenset({"matrix_unit"})))
    assert judge(able).reason == "n is missing"
    assert judge(replace(able, dims={"n": 2}))


def test_the_reason_includes_that_of_the_predicate() -> None:
    judge = acceptance_of(kernel(talkative, platform="tpu"), runs=lending)
    assert judge(REQUEST).reason == "made for tpu, whose kernels host can run; in two passes"


def test_requirements_are_judged_before_the_predicate() -> None:
    verdict = acceptance_of(kernel(failing, requires=Requires(dtypes=("float16",))))(REQUEST)
    assert verdict.reason == "needs dtype float16, got float32"
    assert not verdict.traceback


def test_the_predicate_answers_with_its_reason() -> None:
    judge = acceptance_of(kernel(even))
    assert judge(REQUEST).reason == "n is missing"
    assert judge(Request("kernel", "linear", dims={"n": 2}))


@pytest.mark.parametrize(
    ("predicate", "reason"),
    [
        (failing, "OSError('library not found')"),
        (leaving, "SystemExit('wrong version')"),
        (undecided, "True is not a Verdict"),
    ],
)
def test_a_predicate_that_fails_refuses_with_its_traceback(predicate: object, reason: str) -> None:
    verdict = acceptance_of(kernel(predicate))(REQUEST)
    assert not verdict
    assert verdict.reason.startswith("its own code failed: ")
    assert reason in verdict.reason
    assert verdict.traceback.startswith("Traceback")


def test_a_missing_predicate_refuses() -> None:
    record = Kernel("linear", "fast", "a:b", predicate=f"{__name__}:odd")
    assert "points nowhere" in acceptance_of(record)(REQUEST).reason


class Backend:
    @classmethod
    def accepts(cls, detail: object, capability: Capability) -> Verdict:
        return Verdict.refuse(f"{detail} on {capability.architecture}")


@dataclass(frozen=True)
class Spec:
    def to_json(self) -> dict[str, Any]:
        return {}

    def __str__(self) -> str:
        return "a spec"


def test_an_attention_backend_judges_the_detail_and_the_capability() -> None:
    request = Request("attention", "decoder", "host", Capability("x86_64"), detail=Spec())
    judge = acceptance_of(AttentionEntry("paged", f"{__name__}:Backend"))
    assert judge(request).reason == "a spec on x86_64"
    entry = AttentionEntry("paged", "acme_of_nowhere:X", platform="tpu")
    elsewhere = acceptance_of(entry)
    assert elsewhere(request).reason == "runs on tpu, the request is for host"
    broken = acceptance_of(AttentionEntry("paged", "acme_of_nowhere:X"))
    assert "No module named 'acme_of_nowhere'" in broken(request).reason
