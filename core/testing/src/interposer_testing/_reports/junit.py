"""A verification report as JUnit XML, which CI servers can show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from interposer_testing._reports.legend import CHECKS

if TYPE_CHECKING:
    from interposer_testing._reports.facts import Examined, Finding, Tally
from interposer_testing._reports.report import Report

# Characters that XML 1.0 cannot contain.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report) -> str:
    """Render a report as one test suite with one test case per candidate and aspect.

    An aspect with faults has one test case per failed trial in the report, and one for the number
    of further failed trials. Refused aspects and aspects that did not run are skipped with the
    reasons.
    """
    suite = ElementTree.Element("testsuite", name=f"interposer verify {report.distribution}")
    _add_properties(suite, report)
    shown_causes = set[str]()
    for candidate in report.candidates:
        if candidate.absent:
            _skip(_case(suite, candidate, "not run"), candidate.absent)
        for tally in candidate.tallies:
            _add_tally(suite, candidate, tally, shown_causes)
    counts = {
        "tests": len(suite.findall("testcase")),
        "failures": len(suite.findall("testcase/failure")),
        "errors": 0,
        "skipped": len(suite.findall("testcase/skipped")),
    }
    attributes = {name: str(count) for name, count in counts.items()}
    attributes["time"] = f"{report.seconds:.3f}"
    suite.attrib.update(attributes, timestamp=report.date.removesuffix("Z"))
    ElementTree.SubElement(suite, "system-out").text = _clean(report.summary)
    root = ElementTree.Element("testsuites", attributes)
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_properties(suite: ElementTree.Element, report: Report) -> None:
    ground = report.ground
    facts = {
        "version": report.version,
        "device": ground.device,
        "platform": ground.platform,
        "architecture": ground.architecture,
        "system": ground.system,
        "python": ground.python,
        "torch": ground.torch,
        "seed": str(report.seed),
        "quick": str(report.quick).lower(),
        **{f"version of {name}": version for name, version in ground.versions.items()},
    }
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", name=name, value=_clean(value))


def _add_tally(
    suite: ElementTree.Element, candidate: Examined, tally: Tally, shown_causes: set[str]
) -> None:
    """Append the JUnit test cases of one aspect of a candidate.

    Args:
        shown_causes: causes whose traceback is in the file already; extended by this call.
    """
    if not tally.failed:
        case = _case(suite, candidate, tally.aspect, tally.seconds)
        if not tally.ran:
            _skip(case, "; ".join([*tally.refused, *tally.not_run]))
        return
    failed = dict[tuple[str, str], list["Finding"]]()
    for finding in tally.findings:
        failed.setdefault((finding.dtype, finding.case), []).append(finding)
    for (dtype, label), findings in failed.items():
        name = f"{tally.aspect} [{', '.join(filter(None, (dtype, label)))}]"
        case = _case(suite, candidate, name, tally.seconds / tally.ran)
        _fail(
            case, findings[0].reason, findings[0].check, "\n".join(_lines(findings, shown_causes))
        )
    num_omitted = tally.failed - len(failed)
    if num_omitted > 0:
        case = _case(suite, candidate, f"{tally.aspect} [others]")
        _fail(
            case, f"{num_omitted} more of {tally.ran} trials failed", "others", findings[0].command
        )


def _case(
    suite: ElementTree.Element, candidate: Examined, name: str, seconds: float = 0.0
) -> ElementTree.Element:
    parts = (candidate.provider, candidate.kind, candidate.subject, candidate.name)
    return ElementTree.SubElement(
        suite,
        "testcase",
        # CI servers group test cases by the text before the last dot.
        classname=_clean(".".join(part.replace(".", "_") for part in parts if part)),
        name=_clean(name),
        time=f"{seconds:.3f}",
    )


def _skip(case: ElementTree.Element, reason: str) -> None:
    ElementTree.SubElement(case, "skipped", message=_clean(reason))


def _fail(case: ElementTree.Element, message: str, kind: str, details: str) -> None:
    failure = ElementTree.SubElement(case, "failure", message=_clean(message), type=kind)
    failure.text = _clean(details)


def _lines(findings: Iterable[Finding], shown_causes: set[str]) -> Iterable[str]:
    command = ""
    for finding in findings:
        yield f"{finding.where}: {finding.reason} ({finding.check})"
        if finding.check in CHECKS:
            yield f"  {CHECKS[finding.check]}"
        if finding.traceback and finding.cause not in shown_causes:
            yield finding.traceback.rstrip()
        shown_causes |= {finding.cause} - {""}
        command = finding.command
    yield f"Try again: {command}"


def _clean(text: str) -> str:
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)
