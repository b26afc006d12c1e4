"""A verification tells right, wrong, refused and not run apart, and says it in each form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from markdown_it import MarkdownIt

from interposer import (
    Capability,
    Case,
    Device,
    Kernel,
    OpEntry,
    Registry,
    Request,
    Requires,
    Tolerance,
    Verdict,
    custom_op,
)
from interposer.errors import ConfigError, PluginError, StorageError, UnknownNameError
from interposer.records import Record
from interposer.tooling import Plugins
from interposer_testing import Report, verify
from interposer_testing._reports.facts import Examined, Ground, Tally
from interposer_testing._reports.html import html
from interposer_testing._reports.junit import junit
from interposer_testing._reports.legend import ASPECTS, CHECKS
from interposer_testing._reports.markdown import markdown
from interposer_testing._reports.matrix import Matrix

pytestmark = pytest.mark.process

DEVICE = Device("cpu", "cpu", "a <toy> device", Capability("x86_64"))
LABELS = ("rows", "one row", "<b>wide | rows</b>")


def double_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed)
    for label, shape in zip(LABELS, ((4, 8), (1, 8), (2, 30)), strict=True):
        x = torch.randn(shape, generator=generator).to(dtype)
        yield Case(label, {"x": x}, {"hidden_size": shape[1]}, reduction=0)


@custom_op("toy_double", cases=double_cases, tolerance=Tolerance(roundings=1))
def toy_double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def good(x: torch.Tensor) -> torch.Tensor:
    return x + x


def shifted(x: torch.Tensor) -> torch.Tensor:
    y = x + x
    y[0, 1] += 1
    return y


def raising(x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("no <beads>\x07 & no strings")


def narrow(request: Request) -> Verdict:
    if int(request.dims["hidden_size"]) > 8:
        return Verdict.refuse("rows are wider than 8")
    return Verdict.accept()


OP = OpEntry("toy_double", f"{__name__}:toy_double")


def kernel(name: str, target: str = "good", **options: Any) -> Kernel:
    return Kernel("toy_double", name, f"{__name__}:{target}", **options)


GOOD = kernel("good")
SHIFTED = kernel("shifted", "shifted")
RAISING = kernel("raising", "raising")
NARROW = kernel("narrow", predicate=f"{__name__}:narrow")
NEVER = kernel("never", requires=Requires(features=frozenset({"beads"})))
ELSEWHERE = kernel("elsewhere", platform="cuda")

Verified = Callable[..., Report]


@pytest.fixture
def verified(registered: Callable[..., Registry]) -> Verified:
    """Return a function that verifies a plugin ``acme`` of the op and the given kernels."""

    def run(*records: Record, **options: Any) -> Report:
        registry = registered(OP, *records)
        options = {"op": "toy_double", **options}
        return verify("acme", registry=registry, device=DEVICE, **options)

    return run


@pytest.fixture(scope="module")
def report() -> Report:
    """Return a report with everything in it."""
    from types import ModuleType

    from interposer.hookspecs import hookimpl

    module = ModuleType("acme")
    records = [OP, GOOD, SHIFTED, RAISING, NARROW, NEVER, ELSEWHERE]
    module.interposer_records = hookimpl(lambda: records)  # type: ignore[attr-defined]
    registry = Registry(Plugins.of(module))
    return verify("acme", registry=registry, device=DEVICE, seed=3, date="2026-03-01T12:00:00Z")


def candidate(report: Report, name: str) -> Examined:
    (match,) = [c for c in report.candidates if c.name == name]
    return match


def tally(report: Report, name: str, aspect: str = "numerics") -> Tally:
    (match,) = [t for t in candidate(report, name).tallies if t.aspect == aspect]
    return match


def test_each_candidate_has_the_expected_state(report: Report) -> None:
    states = {c.name: c.state for c in report.candidates if not c.is_declaration}
    assert states == {
        "reference": "correct",
        "good": "correct",
        "shifted": "wrong",
        "raising": "wrong",
        "narrow": "correct",
        "never": "refused",
        "elsewhere": "not run",
    }
    assert report.state == "wrong"
    assert [c.name for c in report.in_state("wrong")] == ["shifted", "raising"]


def test_counts_match_the_trials(report: Report) -> None:
    good, shifted = tally(report, "good"), tally(report, "shifted")
    assert (good.passed, good.failed, good.ran, good.cases) == (9, 0, 9, 3)
    assert (shifted.passed, shifted.failed, shifted.cases) == (0, 9, 3)
    assert tally(report, "narrow").refused == {"rows are wider than 8": 3}
    assert tally(report, "narrow").passed == 6
    assert candidate(report, "good").dtypes == ("float32", "bfloat16", "float16")
    assert 0 < good.seconds < report.seconds


def test_trials_that_cannot_run_state_the_reason(report: Report) -> None:
    (refused,) = candidate(report, "never").reasons("refused")
    assert "beads" in refused
    (not_run,) = candidate(report, "elsewhere").reasons("not run")
    assert "cuda" in not_run
    assert "cpu" in not_run
    assert candidate(report, "elsewhere").ran == 0


def test_a_correct_record_does_not_make_a_kernel_correct(verified: Verified) -> None:
    report = verified(NEVER, op="")
    assert tally(report, "never", "records").passed == 1
    assert candidate(report, "never").state == "refused"


def test_a_report_without_runs_is_not_correct() -> None:
    (module,) = [Examined("module", "", "m", "acme", "1", tallies=(Tally("lightness", passed=1),))]
    refused = Examined(
        "kernel", "op", "k", "acme", "1", tallies=(Tally("numerics", refused={"x": 1}),)
    )
    ground = Ground("d", "cpu", "cpu", "x", "s", "3", "2")
    report = Report("acme", "1", ground, "", 0, False, candidates=(module, refused))
    assert report.state == "refused"
    assert "nothing ran here" in report.summary
    assert replace(report, candidates=(module,)).state == "correct"
    nothing = replace(report, candidates=())
    assert nothing.state == "not run"
    assert "nothing that can be verified" in nothing.summary


def test_a_kernel_for_another_platform_is_listed_with_its_op(
    verified: Verified,
) -> None:
    report = verified(ELSEWHERE)
    (reason,) = candidate(report, "elsewhere").reasons("not run")
    assert reason == "needs the platform cuda, this is cpu"


def test_findings_are_limited_and_reproducible(report: Report, verified: Verified) -> None:
    findings = tally(report, "raising").findings
    assert len(findings) == 3 < tally(report, "raising").failed
    assert {finding.check for finding in findings} == {"call"}
    assert "Traceback" in findings[0].traceback
    assert findings[1].command == (
        "interposer_testing.verify('acme', op='toy_double', case='one row', seed=3, quick=False)"
    )
    again = verified(GOOD, SHIFTED, case="one row", seed=3)
    assert tally(again, "shifted").cases == 1
    numbers = re.compile(r"got \S+;")
    (first,) = [f for f in tally(report, "shifted").findings if f.case == "one row"]
    second = tally(again, "shifted").findings[0]
    assert numbers.findall(first.reason) == numbers.findall(second.reason) != []


def test_the_seed_changes_the_numbers(verified: Verified) -> None:
    first, second = (tally(verified(SHIFTED, seed=seed), "shifted") for seed in (0, 1))
    assert first.findings[0].reason != second.findings[0].reason


def test_progress_names_the_trials(verified: Verified) -> None:
    calls: list[tuple[int, str]] = []
    verified(GOOD, case="rows", progress=lambda *step: calls.append(step))
    assert [number for number, _ in calls] == list(range(len(calls)))
    assert any("acme/good" in name and "rows" in name for _, name in calls)


@pytest.mark.parametrize(
    ("name", "options", "known"),
    [
        ("acmee", {}, ["acme"]),
        ("acme", {"op": "toy_duble"}, ["toy_double"]),
        ("acme", {"op": "toy_double", "case": "row"}, ["rows", "one row", "<b>wide | rows</b>"]),
    ],
)
def test_an_unknown_name_lists_the_known_ones_nearest_first(
    name: str, options: dict[str, Any], known: list[str], registered: Callable[..., Registry]
) -> None:
    with pytest.raises(UnknownNameError) as raised:
        verify(name, registry=registered(OP, GOOD), device=DEVICE, **options)
    assert raised.value.known == known


def test_a_quarantined_plugin_raises(registered: Callable[..., Registry]) -> None:
    def fails() -> list[Record]:
        raise OSError("no beads")

    from types import ModuleType

    from interposer.hookspecs import hookimpl

    module = ModuleType("acme")
    module.interposer_records = hookimpl(fails)  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="no beads"):
        registry = Registry(Plugins.of(module))
    with pytest.raises(PluginError, match="no beads"):
        verify("acme", registry=registry, device=DEVICE)


def test_an_excluded_distribution_is_an_error(
    registered: Callable[..., Registry],
) -> None:
    from interposer.tooling import Skipped

    registry = registered(OP)
    registry.plugins.skipped.append(Skipped("beads", "acme-beads", "disabled by the configuration"))
    with pytest.raises(ConfigError, match=r"acme-beads cannot be verified.*disabled"):
        verify("Acme_Beads", registry=registry, device=DEVICE)


def test_a_plugin_without_candidates_has_an_empty_report(
    registered: Callable[..., Registry],
) -> None:
    report = verify("acme", registry=registered(), device=DEVICE)
    assert report.candidates == ()
    assert report.state == "not run"


# The forms of a report.


def test_json_round_trip_keeps_everything(report: Report, tmp_path: Path) -> None:
    assert Report.from_json(report.to_json()) == report
    report.write(tmp_path / "new" / "report.json")
    assert Report.read(tmp_path / "new" / "report.json") == report
    facts = report.to_dict()
    assert (facts["format"], facts["state"], facts["date"]) == (1, "wrong", "2026-03-01T12:00:00Z")
    assert facts["ground"]["versions"]["acme"] == "in code"
    assert facts["candidates"][1]["tallies"][0]["state"] == "correct"


def test_json_with_unknown_keys_is_read(report: Report) -> None:
    facts = report.to_dict()
    facts["candidates"] = [
        {**told, "tallies": [{**row, "later": 1} for row in told["tallies"]], "later": 1}
        for told in facts["candidates"]
    ]
    facts["ground"]["later"] = facts["later"] = 1
    assert Report.from_json(json.dumps(facts)) == report


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1}'])
def test_json_that_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(StorageError, match="cannot be read as a report"):
        Report.read(tmp_path / "report.json")


def test_text_shows_faults_and_the_command_to_reproduce(report: Report) -> None:
    text = str(report)
    assert "shifted for kernel 'toy_double' (acme in code): wrong in float32" in text
    assert (
        "WRONG shifted for kernel 'toy_double', numerics: 9 of 9 trials failed; the first 3:"
        in text
    )
    assert f"(value: {CHECKS['value']})" in text
    assert "Try again: interposer_testing.verify('acme'" in text
    assert "refused: rows are wider than 8, 3 times" in text
    assert text.endswith(report.summary)
    # The second is the module, which was given in code.
    assert report.summary == "wrong: 3 correct, 2 wrong, 1 refused, 2 not run."
    assert 1 <= text.count("Traceback") <= 4  # one for each aspect at most, not one for each case


def test_junit_counts_are_correct_and_unrun_trials_are_skipped(report: Report) -> None:
    root = ElementTree.fromstring(junit(report))
    (suite,) = root
    cases = suite.findall("testcase")
    assert int(suite.attrib["tests"]) == len(cases)
    assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure")) > 0
    assert int(suite.attrib["skipped"]) == len(suite.findall("testcase/skipped")) > 0
    assert len({(c.attrib["classname"], c.attrib["name"]) for c in cases}) == len(cases)
    assert suite.attrib["timestamp"] == "2026-03-01T12:00:00"

    def of(name: str) -> dict[str, ElementTree.Element]:
        end = f".toy_double.{name}"
        return {c.attrib["name"]: c for c in cases if c.attrib["classname"].endswith(end)}

    assert len(of("good")["numerics"]) == 0
    (skipped,) = of("never")["numerics"]
    assert skipped.tag == "skipped"
    assert "beads" in skipped.attrib["message"]
    (failure,) = of("shifted")["numerics [float32, <b>wide | rows</b>]"]
    assert failure.tag == "failure"
    assert "Try again" in (failure.text or "")
    (others,) = of("shifted")["numerics [others]"]
    assert others.attrib["message"] == "6 more of 9 trials failed"
    assert "numerics" not in of("shifted")


class Page(HTMLParser):
    """Counts tags, checks that they close, and collects the text."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_valid_and_self_contained(report: Report) -> None:
    text = html([report])
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert not {"script", "link", "img", "b"} & set(page.tags)
    assert not {"src", "href", "onclick"} & set(page.attributes)
    assert "url(" not in text
    for part in ("a <toy> device", "<b>wide | rows</b>", "wrong (9 of 9)", "rows are wider than 8"):
        assert part in page.text
    assert page.tags.count("caption") == page.tags.count("table") == 2


def test_markdown_renders_to_the_matrix(report: Report) -> None:
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown([report]))
    assert "<td>wrong (9 of 9)</td>" in rendered
    assert "<td>elsewhere (acme)</td>" in rendered
    assert "a &lt;toy&gt; device" in rendered
    assert "<b>" not in rendered
    assert "Try again: interposer_testing.verify(" in rendered


def test_reports_of_several_devices_make_one_matrix(report: Report) -> None:
    # On a GPU, ``elsewhere`` runs and ``good`` was removed.
    ran = Examined(
        "kernel",
        "toy_double",
        "elsewhere",
        "acme",
        "2",
        "cuda",
        ("bfloat16",),
        (Tally("numerics", 4),),
    )
    other = replace(
        report, ground=replace(report.ground, device="gpu", platform="cuda"), candidates=(ran,)
    )
    matrix = Matrix.of([report, other])
    assert matrix.titles == ("a <toy> device (cpu)", "gpu (cuda)")
    cells = {row.name: [cell.text for cell in row.cells] for row in matrix.rows}
    assert cells["elsewhere"] == ["not run", "correct: bfloat16"]
    assert cells["good"] == ["correct: float32, bfloat16, float16", "-"]
    for form in (html, markdown):
        assert "correct: bfloat16" in form([report, other])
    again = Matrix.of([report, replace(report, date="2026-03-02T12:00:00Z")])
    assert again.titles[1] == "a <toy> device (cpu), 2026-03-02T12:00:00Z"


def test_the_legend_explains_every_check_and_aspect() -> None:
    from typing import get_args

    from interposer_testing._checks.fault import Check
    from interposer_testing._trials.trial import Aspect

    assert set(get_args(Check)) == set(CHECKS)
    assert set(get_args(Aspect)) == set(ASPECTS)
