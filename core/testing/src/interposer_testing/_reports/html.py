"""Verification reports as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from interposer_testing._reports.causes import Cause, is_explained, shared_causes
from interposer_testing._reports.legend import ASPECTS, CHECKS, STATES
from interposer_testing._reports.matrix import Cell, Matrix

if TYPE_CHECKING:
    from interposer_testing._reports.facts import Examined, Finding, Tally
from interposer_testing._reports.report import Report

# Inline, so that the page works as an attachment and without a network.
_STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --dim: #5b6470; --back: #fff; --line: #d5d9de;
  --head: #f3f5f7; --good: #0b6b34; --good-back: #e3f4e9; --bad: #a3121f; --bad-back: #fde7e7;
  --refused: #74520a; --refused-back: #fbf1d7; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7ea; --dim: #a0a8b2; --back: #15181c;
  --line: #363c44; --head: #1f242a; --good: #7fd6a0; --good-back: #133021; --bad: #ff9b9b;
  --bad-back: #401a1d; --refused: #e8c777; --refused-back: #352b12; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 75rem; background: var(--back);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .4rem; }
.scroll:focus-visible { outline: 2px solid currentColor; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: start; padding: .5rem .75rem; color: var(--dim); }
th, td { text-align: start; vertical-align: top; padding: .4rem .75rem;
  border-top: 1px solid var(--line); }
thead th { background: var(--head); white-space: nowrap; }
tbody th { font-weight: 600; white-space: nowrap; }
small { display: block; color: var(--dim); font-weight: 400; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; }
ul { margin: .25rem 0; padding-inline-start: 1.25rem; }
td { white-space: nowrap; }
.state { border-radius: .3rem; padding: .1rem .4rem; }
.correct { color: var(--good); background: var(--good-back); }
.wrong { color: var(--bad); background: var(--bad-back); font-weight: 600; }
.refused { color: var(--refused); background: var(--refused-back); }
.not-run { color: var(--dim); background: var(--head); }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .5rem 0;
  padding: .5rem .75rem; }
summary { cursor: pointer; overflow-wrap: anywhere; }
pre { overflow-x: auto; background: var(--head); padding: .5rem; border-radius: .3rem;
  font-size: .85rem; }
li { overflow-wrap: anywhere; }
dt { font-weight: 600; }
dd { margin: 0 0 .4rem; color: var(--dim); }
"""


def html(reports: Sequence[Report]) -> str:
    """Render reports as an HTML page: devices, support matrix, faults, reasons and legend."""
    names = dict.fromkeys(f"{report.distribution} {report.version}" for report in reports)
    title = escape(f"Support matrix: {', '.join(names)}")
    body = [f"<h1>{title}</h1>", *_results(reports), _grounds(reports), _matrix(reports)]
    body += [*_faults(reports), *_reasons(reports), *_legend(reports)]
    head = (
        '<meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style>"
    )
    main = "\n".join(body)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n'
        f"<body>\n<main>\n{main}\n</main>\n</body>\n</html>\n"
    )


def _results(reports: Sequence[Report]) -> Iterator[str]:
    for report in reports:
        where = f" on {escape(report.ground.device)}:" if len(reports) > 1 else ""
        state, _, counts = report.summary.partition(":")
        yield f"<p>{_state(Cell(report.state, state))}{where}{escape(counts)}</p>"


def _grounds(reports: Sequence[Report]) -> str:
    machine_titles = ("device", "platform", "architecture", "torch", "Python", "system")
    run_titles = ("date", "seed", "cases", "seconds")
    rows = []
    for report in reports:
        ground = report.ground
        cases = report.case or ("few of each op" if report.quick else "all")
        machine = (ground.platform, ground.architecture, ground.torch, ground.python, ground.system)
        facts = (*machine, report.date, str(report.seed), cases, f"{report.seconds:.0f}")
        rows.append(
            f'<th scope="row">{escape(ground.device)}</th>'
            + "".join(f"<td>{escape(fact)}</td>" for fact in facts)
        )
    return _table("Devices", "One line for each report", machine_titles + run_titles, rows)


def _matrix(reports: Sequence[Report]) -> str:
    matrix = Matrix.of(reports)
    rows = [
        f'<th scope="row">{escape(row.name)}<small>{escape(row.provider)}</small></th>'
        f"<td>{escape(row.subject)}</td>"
        + "".join(f"<td>{_state(cell)}</td>" for cell in row.cells)
        for row in matrix.rows
    ]
    caption = "States with the number of trials; if some failed, failed of all"
    if len(reports) > 1:
        caption = "States with the dtypes in which the candidate ran"
    return _table("Results", caption, ("candidate", "for", *matrix.titles), rows)


def _table(heading: str, caption: str, titles: Sequence[str], rows: Sequence[str]) -> str:
    """Render a table in a region that scrolls if it is too wide, also by keyboard."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f"<h2>{escape(heading)}</h2>\n"
        f'<div class="scroll" role="region" aria-label="{escape(heading)}" tabindex="0"><table>\n'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _state(cell: Cell) -> str:
    if cell.state is None:
        return escape(cell.text)
    kind = cell.state.replace(" ", "-")
    return f'<span class="state {kind}">{escape(cell.text)}</span>'


def _faults(reports: Sequence[Report]) -> Iterator[str]:
    faults = list[str]()
    for report in reports:
        where = f" on {report.ground.device}" if len(reports) > 1 else ""
        causes = shared_causes(report.candidates)
        faults += [_cause(cause, where) for cause in causes]
        faults += [
            _fault(candidate, tally, where)
            for candidate in report.candidates
            for tally in candidate.tallies
            if tally.failed and not is_explained(tally, causes)
        ]
    if faults:
        yield "<h2>Faults</h2>"
        # Show the first fault opened, all others collapsed.
        yield faults[0].replace("<details>", "<details open>", 1)
    yield from faults[1:]


def _cause(cause: Cause, where: str) -> str:
    hits = "".join(f"<li>{escape(line)}</li>" for line in cause.hit_lines)
    return (
        f"<details><summary>{escape(cause.title + where)}</summary><ul>{hits}</ul>"
        f"<pre>{escape(cause.first.traceback)}</pre>"
        f"<p>Try again:</p><pre>{escape(cause.first.command)}</pre></details>"
    )


def _fault(candidate: Examined, tally: Tally, where: str) -> str:
    title = f"{candidate.title}, {tally.aspect}{where}: {tally.failed} of {tally.ran} trials failed"
    cases = dict[tuple[str, str], list["Finding"]]()
    for finding in tally.findings:
        cases.setdefault((finding.dtype, finding.case), []).append(finding)
    parts = [f"<p>{escape(ASPECTS[tally.aspect])}</p>"] if tally.aspect in ASPECTS else []
    for (dtype, case), findings in cases.items():
        parts.append(f"<h3>{escape(', '.join(filter(None, (dtype, f'case {case!r}'))))}</h3><ul>")
        parts += [_finding(finding) for finding in findings]
        # All findings of a case have the same command.
        parts.append(f"</ul><p>Try again:</p><pre>{escape(findings[0].command)}</pre>")
    num_omitted = tally.failed - len(cases)
    if num_omitted > 0:
        parts.append(f"<p>{num_omitted} more failed; the report contains only the first.</p>")
    return f"<details><summary>{escape(title)}</summary>{''.join(parts)}</details>"


def _finding(finding: Finding) -> str:
    meaning = CHECKS.get(finding.check, "")
    meaning = f"<br>{escape(finding.check)}: {escape(meaning)}" if meaning else ""
    trace = ""
    if finding.traceback:
        trace = f"<details><summary>traceback</summary><pre>{escape(finding.traceback)}</pre>"
        trace += "</details>"
    return f"<li>{escape(f'{finding.where}: {finding.reason}')}{meaning}{trace}</li>"


def _reasons(reports: Sequence[Report]) -> Iterator[str]:
    blocks = [
        f"<details><summary>{escape(candidate.title)} on {escape(report.ground.device)}"
        f"</summary><ul>{''.join(lines)}</ul></details>"
        for report in reports
        for candidate in report.candidates
        if (lines := [*_reason_lines(candidate)])
    ]
    if blocks:
        yield "<h2>Reasons for refused and not run</h2>"
    yield from blocks


def _reason_lines(candidate: Examined) -> Iterator[str]:
    for state in ("refused", "not run"):
        for reason, count in candidate.reasons(state).items():
            times = f", {count} times" if count > 1 else ""
            yield f"<li>{state}: {escape(reason)}{times}</li>"


def _legend(reports: Sequence[Report]) -> Iterator[str]:
    aspects = dict.fromkeys(aspect for report in reports for aspect in report.aspects)
    entries = [*STATES.items(), *((aspect, ASPECTS.get(aspect, "")) for aspect in aspects)]
    yield "<h2>Legend</h2><dl>"
    for word, meaning in entries:
        yield f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>"
    yield "</dl>"
