"""Draw the four figures of docs/architecture.md as plain SVG.

    python docs/figures/diagrams.py [--check]

``--check`` writes nothing and fails where a figure is not what this draws.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

__all__ = ["DRAWINGS", "Canvas"]

FOLDER = Path(__file__).parent
FONT = "Helvetica, Arial, sans-serif"
INK, QUIET, LINE, PAPER = "#1c2330", "#5d6675", "#8a93a3", "#ffffff"
CORE, PART, PLUGIN, DATA = "#dfe3f6", "#e9ecf1", "#e3f1e6", "#fbf3dc"
REFUSED = "#f7e1df"
LEADING = 17


class Canvas:
    """Marks of one figure, in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.marks: list[str] = []

    def text(self, x: float, y: float, said: str, color: str = INK, **options: str) -> None:
        """Write one line; ``anchor`` is start, middle or end, ``weight`` bold or normal."""
        anchor, weight = options.get("anchor", "start"), options.get("weight", "normal")
        size = options.get("size", "13")
        self.marks.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"'
            f' font-weight="{weight}">{escape(said)}</text>'
        )

    def box(
        self, at: tuple[int, int, int, int], title: str, *lines: str, color: str = PART
    ) -> None:
        """Draw a box ``(x, y, width, height)`` with a title and lines, all centred."""
        x, y, width, height = at
        self.marks.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{color}"'
            f' stroke="{LINE}"/>'
        )
        rows = bool(title) + len(lines)
        top = y + (height - rows * LEADING) / 2 + 13
        if title:
            self.text(x + width / 2, top, title, anchor="middle", weight="bold")
            top += LEADING
        for line in lines:
            self.text(x + width / 2, top, line, QUIET, anchor="middle", size="12")
            top += LEADING

    def arrow(self, *points: tuple[float, float], said: str = "", at: Sequence[float] = ()) -> None:
        """Draw an arrow along points, and what it means near its middle, or at a point."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self.marks.append(f'<path d="M{path}" fill="none" stroke="{INK}" marker-end="url(#head)"/>')
        if said:
            (x0, y0), (x1, y1) = points[0], points[-1]
            x, y = at or ((x0 + x1) / 2 + 6, (y0 + y1) / 2 + 4)
            self.text(x, y, said, QUIET, size="12")

    def svg(self) -> str:
        """Return the figure."""
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" role="img" aria-label="{escape(self.title)}" font-family="{FONT}">'
        )
        marker = (
            '<defs><marker id="head" markerWidth="9" markerHeight="9" refX="8" refY="4.5"'
            f' orient="auto"><path d="M0 1L8 4.5L0 8z" fill="{INK}"/></marker></defs>'
        )
        paper = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
        return "\n".join([head, marker, paper, *self.marks, "</svg>", ""])


def layers() -> Canvas:
    """Distributions: a box may import what stands below it, and nothing beside it."""
    c = Canvas(860, 724, "Layers of distributions")
    c.box((20, 20, 190, 56), "interposer-serve", "endpoints, one batch")
    c.box((20, 96, 190, 56), "interposer-adapt", "models of transformers")
    c.box((20, 172, 190, 56), "interposer-engine", "loader, caches, sampling")
    c.box((20, 248, 190, 64), "interposer-models", "families, decoder", color=CORE)
    c.box((222, 248, 296, 64), "interposer-cpu, -cuda, -rocm, -xpu", "platforms and their kernels")
    c.box((530, 248, 190, 64), "plugins", "GGUF, NF4, traces, yours", color=PLUGIN)
    c.box((20, 332, 700, 56), "interposer-quantization", "schemes, checkpoint formats, writing")
    c.box((20, 408, 430, 56), "interposer-ops", "ops, references, cases, portable kernels, layers")
    c.box((462, 408, 258, 56), "interposer-tools", "command line, doctor, tuner, templates")
    c.box((20, 484, 700, 56), "interposer-testing", "conformance kit: cases, checks, reports")
    c.box(
        (20, 560, 700, 64),
        "interposer",
        "contract and selection; no kernel, no model, no vendor",
        color=CORE,
    )
    c.box(
        (20, 636, 700, 56), "interposer-sandbox", "foreign code in a guarded fork, and what it did"
    )
    c.arrow((760, 40), (760, 686))
    c.text(772, 344, "may import", QUIET)
    c.text(772, 361, "what is", QUIET)
    c.text(772, 378, "below", QUIET)
    return c


def selection() -> Canvas:
    """One choice: a request, its candidates and the policy go in, a choice comes out."""
    c = Canvas(980, 440, "Selection: from a request to a choice")
    c.box(
        (20, 20, 200, 76),
        "Request",
        "kind, op, dtype, dims,",
        "device, place in the model",
        color=DATA,
    )
    c.box(
        (20, 116, 200, 76),
        "Candidates",
        "records of all plugins,",
        "with provider and version",
        color=DATA,
    )
    c.box(
        (20, 212, 200, 76),
        "Policy",
        "pin, prefer, forbid, require",
        "Config, files, environment",
        color=DATA,
    )
    c.box(
        (20, 308, 200, 76),
        "Measurements",
        "of this host, or tables",
        "that plugins ship",
        color=DATA,
    )
    c.box(
        (280, 84, 180, 140),
        "1. Acceptance",
        "forbidden? property?",
        "platform, features,",
        "dtype, dims, predicate;",
        "no kernel is imported",
        color=CORE,
    )
    c.box(
        (520, 84, 180, 140),
        "2. Ranking",
        "pin, then preference,",
        "then measured time,",
        "then score, then name",
        color=CORE,
    )
    c.box(
        (760, 84, 200, 140),
        "3. Gates, for the first",
        "load it (sandbox first),",
        "confirm, canary against",
        "the reference",
        color=CORE,
    )
    for y in (58, 154, 250):
        c.arrow((220, y), (280, 154))
    c.arrow((220, 346), (610, 346), (610, 224))
    c.arrow((460, 154), (520, 154))
    c.arrow((700, 154), (760, 154))
    c.arrow((860, 84), (860, 48), (610, 48), (610, 84), said="failed: the next one", at=(668, 40))
    c.box(
        (760, 300, 200, 92),
        "Choice",
        "the kernel's own function,",
        "the rule that decided,",
        "every refusal with its reason",
        color=PLUGIN,
    )
    c.arrow((860, 224), (860, 300))
    c.box((280, 372, 250, 50), "Refusal", "of every candidate that is out", color=REFUSED)
    c.arrow((370, 224), (370, 372))
    c.arrow((530, 397), (740, 397), (740, 370), (760, 370))
    c.text(548, 414, "none left: an error that lists all", QUIET, size="12")
    return c


def loading() -> Canvas:
    """A load: from a model directory to an engine."""
    c = Canvas(980, 330, "Loading: from a directory to an engine")
    rows = [
        (
            (20, 30),
            "Model directory",
            ("config.json, tokenizer,", "safetensors, or a file", "of a plugin's format"),
            DATA,
        ),
        (
            (265, 30),
            "Parse",
            ("architecture, rotary,", "quantization_config:", "scheme per method"),
            PART,
        ),
        (
            (510, 30),
            "Build on meta",
            ("layers without memory;", "every choice is made,", "each kernel is bound"),
            CORE,
        ),
        (
            (755, 30),
            "Plan",
            ("interposer explain", "and tune stop here,", "no weight was read"),
            PLUGIN,
        ),
        (
            (755, 190),
            "Stream tensors",
            ("tables first, then block", "by block, each to its", "rows of a parameter"),
            PART,
        ),
        (
            (510, 190),
            "Finalize a layer",
            ("scheme repacks, kernel", "prepares its constants,", "the original is freed"),
            PART,
        ),
        (
            (265, 190),
            "Finish the model",
            ("rotary tables; the KV", "cache gets a share of", "the memory that is left"),
            CORE,
        ),
        (
            (20, 190),
            "Engine",
            ("paged KV cache, batches,", "graphs of decode steps", "where the platform can"),
            PLUGIN,
        ),
    ]
    for (x, y), title, lines, color in rows:
        c.box((x, y, 205, 100), title, *lines, color=color)
    for x in (225, 470, 715):
        c.arrow((x, 80), (x + 40, 80))
        c.arrow((x + 40, 240), (x, 240))
    c.arrow((857, 130), (857, 190))
    c.arrow((612, 290), (612, 312), (857, 312), (857, 290))
    c.text(668, 306, "the next layer", QUIET, size="12")
    return c


def sandbox() -> Canvas:
    """The examination of foreign code: who starts whom, and what is kept."""
    c = Canvas(980, 380, "Sandbox: the processes of an examination")
    c.box(
        (20, 40, 250, 130),
        "Your process",
        "finds entry points, reads",
        "metadata, asks for a verdict;",
        "imports a plugin only",
        "after it was accepted",
        color=CORE,
    )
    c.box(
        (365, 40, 250, 130),
        "Examining process",
        "one per program, imports",
        "torch once; runs no",
        "plugin code itself;",
        "ends after a minute idle",
    )
    c.box(
        (710, 40, 250, 130),
        "Fork, one per task",
        "imports the plugin, calls its",
        "hook, loads classes, probes,",
        "compares kernels; reports",
        "each stage as it goes",
        color=PLUGIN,
    )
    c.arrow((270, 85), (365, 85), said="task", at=(304, 78))
    c.arrow((365, 130), (270, 130), said="verdict", at=(296, 148))
    c.arrow((615, 85), (710, 85), said="fork", at=(650, 78))
    c.arrow((710, 130), (615, 130), said="stages", at=(644, 148))
    c.box(
        (20, 250, 250, 92),
        "Cache of verdicts",
        "by version, content, torch,",
        "driver, machine: asked first,",
        "written last",
        color=DATA,
    )
    c.arrow((110, 250), (110, 170))
    c.arrow((180, 170), (180, 250))
    c.box(
        (365, 250, 250, 92),
        "Limit of time",
        "probe_seconds per step;",
        "a fork that is late,",
        "crashes or exits is a refusal",
        color=REFUSED,
    )
    c.arrow((490, 250), (490, 170))
    c.box(
        (710, 250, 250, 92),
        "Side effects",
        "environment, signals, threads,",
        "output, settings of torch,",
        "modules of others: a refusal",
        color=REFUSED,
    )
    c.arrow((835, 250), (835, 170))
    return c


DRAWINGS: dict[str, Callable[[], Canvas]] = {
    "layers": layers,
    "selection": selection,
    "loading": loading,
    "sandbox": sandbox,
}


def main() -> None:
    """Write the figures, or compare them with what is written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    stale = []
    for name, draw in DRAWINGS.items():
        file, drawn = FOLDER / f"{name}.svg", draw().svg()
        if not check:
            file.write_text(drawn, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != drawn:
            stale.append(file.name)
    if stale:
        sys.exit(f"{', '.join(stale)}: not what the script draws. Try: python {sys.argv[0]}")


if __name__ == "__main__":
    main()
