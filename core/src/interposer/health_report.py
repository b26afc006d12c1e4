"""How ``Health`` reads: as plain text, and as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from interposer.table import table

if TYPE_CHECKING:
    from interposer.health import Health, InstalledPlugin

__all__ = ["renderables", "text"]


def text(health: Health) -> str:
    """Return the facts as lines; what failed stands last."""
    blocks = [_head(health)]
    for title, _, rows in _sections(health):
        blocks.append([f"{title}:", *(f"  {_line(*cells)}" for cells in rows)])
    blocks += [[f"warning: {warning}"] for warning in health.warnings]
    blocks += _problems(health)
    return "\n\n".join("\n".join(block) for block in blocks)


def renderables(health: Health) -> Iterator[Any]:
    """Yield what rich prints."""
    from rich.text import Text

    yield Text("\n".join(_head(health)))
    for title, titles, rows in _sections(health):
        yield table(title, titles, rows)
    for warning in health.warnings:
        yield Text(f"warning: {warning}", style="yellow")
    for block in _problems(health):
        yield Text("\n".join(block), style="" if health.healthy else "red")


def _head(health: Health) -> list[str]:
    told, torch = health.versions, health.torch
    build = ", ".join(f"{name} {value}" for name, value in torch["build"].items())
    lines = [
        f"interposer {told['interposer']}, API {told['api']}, Python {told['python']}, "
        f"{told['system']}",
        f"torch {torch['version']} ({build}), {torch['threads']} threads, built for "
        f"{torch['accelerator'] or 'no accelerator'}",
    ]
    if health.device is not None:
        d = health.device
        memory = f"{d['memory_bytes'] / 2**30:.1f} GiB"
        what = f"{d['architecture']}, {d['units']} units, {memory}, {', '.join(d['dtypes'])}"
        lines.append(f"device: {d['torch_device']} ({d['name']}): {what}")
    return lines


def _sections(health: Health) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Yield title, column titles and rows of every table that has any."""
    found: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = [
        ("this machine", ("subject", "what holds"), [*health.machine.items()]),
        (
            "platforms",
            ("platform", "provider", "probe"),
            [
                (
                    p.name,
                    f"{p.provider} {p.version}",
                    f"{'accepted' if p.accepted else 'refused'}: {p.reason}".removesuffix(": "),
                )
                for p in health.platforms
            ],
        ),
        (
            "plugins",
            ("plugin", "distribution", "provides"),
            [
                *((p.name, f"{p.distribution} {p.version}", _provided(p)) for p in health.plugins),
                *((s.name, s.distribution, f"not used: {s.reason}") for s in health.skipped),
            ],
        ),
        (
            "policy, the strongest first",
            ("source", "file", "sets"),
            [(s.name, s.path, _fields(s.fields)) for s in health.sources],
        ),
    ]
    if health.cache is not None:
        rows: list[tuple[str, ...]] = [
            (kind, f"{number} entries") for kind, number in health.cache.entries.items()
        ]
        found.append((f"cache {health.cache.path}", ("kind", "holds"), rows or [("empty", "")]))
    if health.lock:
        path, _, state = health.lock.rpartition(": ")
        found.append(("lock", ("file", "state"), [(path, state)]))
    yield from (section for section in found if section[2])


def _line(name: str, origin: str, what: str = "") -> str:
    """Return the cells of a row as a line; the middle one may be empty."""
    if not what:
        return f"{name}: {origin}" if origin else name
    return f"{name} ({origin}): {what}" if origin else f"{name}: {what}"


def _provided(plugin: InstalledPlugin) -> str:
    counts = [f"{count} {kind}" for kind, count in plugin.records.items()]
    return ", ".join([*counts, *plugin.hooks]) or "nothing"


def _fields(fields: dict[str, Any]) -> str:
    said = (f"{name} = {'none' if value == [] else value}" for name, value in fields.items())
    return ", ".join(said) or "nothing"


def _problems(health: Health) -> list[list[str]]:
    blocks = []
    for problem in health.problems:
        lines = [f"FAILED {problem.subject}: {problem.reason}"]
        lines += [f"  Try: {problem.mend}"] if problem.mend else []
        lines += [f"    {line}" for line in problem.traceback.splitlines()]
        blocks.append(lines)
    return blocks or [["Nothing failed."]]
