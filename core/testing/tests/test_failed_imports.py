"""A report tells an import that fails once, with everything that is wrong because of it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from interposer import Capability, Device, Kernel, OpEntry, Registry, SchemeEntry
from interposer_testing import Report, verify
from interposer_testing._reports.html import html
from interposer_testing._reports.junit import junit
from interposer_testing._reports.markdown import markdown

DEVICE = Device("cpu", "cpu", "a toy device", Capability("x86_64"))
BROKEN = "import acme_library_that_is_absent\n"
RECORDS = (
    OpEntry("acme_one", "acme_broken:one"),
    OpEntry("acme_two", "acme_broken:two"),
    Kernel("acme_one", "acme_one_fast", "acme_kernels:one"),
    Kernel("acme_two", "acme_two_fast", "acme_kernels:two"),
    SchemeEntry("acme", "rows", "acme_broken:Rows", examples="acme_broken:examples"),
)
TITLES = (
    "reference for kernel 'acme_one'",
    "reference for kernel 'acme_two'",
    "acme_one_fast for kernel 'acme_one'",
    "acme_two_fast for kernel 'acme_two'",
    "rows for scheme 'acme'",
)


@pytest.fixture
def verified(
    registered: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], Report]]:
    """Yield a function that verifies the records with given sources of the modules they name."""

    def run(ops: str, kernels: str) -> Report:
        (tmp_path / "acme_broken.py").write_text(ops)
        (tmp_path / "acme_kernels.py").write_text(kernels)
        monkeypatch.syspath_prepend(tmp_path)
        return verify("acme", registry=registered(*RECORDS), device=DEVICE)

    yield run
    sys.modules.pop("acme_kernels", None)  # other tests see what of theirs is imported


KERNELS = "def one(x):\n    return x\n\n\ndef two(x):\n    return x\n"


@pytest.fixture
def report(verified: Callable[[str, str], Report]) -> Report:
    return verified(BROKEN, KERNELS)


def test_text_shows_a_failed_import_once_with_its_records(report: Report) -> None:
    (block,) = (block for block in str(report).split("\n\n") if block.startswith("WRONG"))
    lines = block.splitlines()
    assert re.fullmatch(
        r"WRONG 5 records, by one import that fails: ModuleNotFoundError\(.*is_absent'\"\) "
        r"\(.*acme_broken\.py:1\)",
        lines[0],
    )
    assert {line.strip().partition(": ")[0] for line in lines[1:6]} == set(TITLES)
    assert "  reference for kernel 'acme_one': numerics, records" in lines
    assert block.count("Traceback (most recent call last)") == 1
    assert lines[-1].strip().startswith("Try again: interposer_testing.verify('acme', ")
    assert str(report).count("is_absent") == block.count("is_absent")


def test_every_record_stays_wrong_and_json_holds_each(report: Report) -> None:
    assert report.state == "wrong"
    assert {c.title for c in report.in_state("wrong")} == set(TITLES)
    findings = [
        finding for c in report.candidates for tally in c.tallies for finding in tally.findings
    ]
    assert len({finding.cause for finding in findings}) == 1
    assert Report.from_json(report.to_json()) == report
    facts = json.loads(report.to_json())
    del facts["candidates"][0]["tallies"][0]["findings"][0]["cause"]
    earlier = Report.from_json(json.dumps(facts))  # of a kit that did not know causes
    assert earlier.candidates[0].tallies[0].findings[0].cause == ""


def test_pages_show_a_failed_import_once(report: Report) -> None:
    for page in (html([report]), markdown([report])):
        assert page.count("Traceback (most recent call last)") == 1
        assert page.count("by one import that fails") == 1
    assert html([report]).count("<details open>") == 1
    suite = ElementTree.fromstring(junit(report))[0]
    failures = [failure.text or "" for failure in suite.iter("failure")]
    assert len(failures) >= len(TITLES)
    assert sum("Traceback" in text for text in failures) == 1


def test_other_faults_are_shown_too(verified: Callable[[str, str], Report]) -> None:
    report = verified(BROKEN, "1 / 0\n")
    blocks = [block for block in str(report).split("\n\n") if block.startswith("WRONG")]
    first, second = sorted(blocks, key=lambda block: "ZeroDivisionError" in block)
    assert first.startswith("WRONG 3 records, by one import that fails: ModuleNotFoundError")
    assert second.startswith("WRONG 2 records, by one import that fails: ZeroDivisionError")
    assert "acme_kernels.py:1)" in second


def test_an_exception_in_a_call_is_shown_for_each_record(
    registered: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_raising.py").write_text(
        "def examples():\n    raise ZeroDivisionError('no rows')\n\n\nclass Rows:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    schemes = [
        SchemeEntry(method, method, "acme_raising:Rows", examples="acme_raising:examples")
        for method in ("one", "two")
    ]
    report = verify("acme", registry=registered(*schemes), device=DEVICE)
    assert str(report).count("raised ZeroDivisionError('no rows')") == 2
    assert "import that fails" not in str(report)
