"""The ops that are installed: their definitions in words, as text, JSON or a page of Markdown."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from interposer import CustomOp, Registry
from interposer.errors import UnknownNameError
from interposer.records import OpEntry
from interposer_testing.cases import CaseSpace, planned_cases

_SECTION = re.compile(r"^(Args|Dims|Returns|Raises|Source):\s*(.*)$")
_ARGUMENT = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")
_SHOWN = ("dims", "mutates", "constants", "batched", "ragged", "properties", "dtypes", "kernels")


@dataclass(frozen=True, slots=True)
class OpFacts:
    """The declarations of one op.

    Attributes:
        family: the module that defines it, without its package.
        description: the reference's docstring.
        dims: what requests state of it, as its cases do.
        always_taken: what a kernel has to take of an argument whatever a request states, in words,
            by argument.
        cases: how many distinct cases it has, over all dtypes.
        dtypes: those of its cases, empty where only building them would tell.
        kernels: of all platforms, each as ``provider/name``; the reference is not among them.
    """

    name: str
    provider: str
    family: str
    schema: str
    description: str
    dims: tuple[str, ...]
    always_taken: dict[str, str]
    mutates: tuple[str, ...]
    constants: tuple[str, ...]
    batched: tuple[str, ...]
    ragged: tuple[str, ...]
    properties: tuple[str, ...]
    dtypes: tuple[str, ...]
    cases: int
    kernels: tuple[str, ...]

    @classmethod
    def of(cls, registry: Registry, name: str) -> OpFacts:
        """Return the facts of a registered op.

        Raises: PluginError: its definition cannot be imported.
        """
        entry = registry.ops[name]
        candidates = registry.candidates("kernel", name)
        (reference,) = (c for c in candidates if isinstance(c.record, OpEntry))
        op: CustomOp[..., Any] = registry.load(reference, entry.target)
        kernels = (c for c in candidates if c is not reference)
        space = op.cases
        dtypes = space.dtypes if isinstance(space, CaseSpace) else ()
        planned = list(planned_cases(op, seed=0))
        return cls(
            name,
            reference.provider,
            entry.target.partition(":")[0].rpartition(".")[2],
            op.schema,
            inspect.cleandoc(op.__doc__ or ""),
            tuple(planned[0].build().dims) if planned else (),
            space.always_taken() if isinstance(space, CaseSpace) else {},
            op.mutates,
            op.constants,
            op.batched,
            tuple(op.ragged),
            tuple(sorted(entry.properties)),
            tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
            len(planned),
            tuple(sorted(kernel.qualified_name for kernel in kernels)),
        )

    def lines(self) -> Iterator[str]:
        """Yield what a reader wants to know, line by line."""
        yield f"{self.schema}  ({self.provider})"
        yield from ("", *self.description.splitlines(), "")
        for label in _SHOWN:
            values = getattr(self, label)
            if values:
                yield f"{label}: {', '.join(values)}"
        for words, names in self._taken():
            yield f"every kernel takes {', '.join(names)}: {words}"
        yield f"cases: {self.cases}"

    def markdown(self) -> Iterator[str]:
        """Yield the op's section of a page."""
        yield from (f"### `{self.name}`", "", f"`{self.schema}`", "")
        yield from _paragraphs(self.description)
        if self.always_taken:
            yield from ("**Always taken**", "")
            for words, names in self._taken():
                yield f"- {', '.join(f'`{name}`' for name in names)}: {words}"
            yield ""
        facts = [
            f"{label} {', '.join(f'`{value}`' for value in values)}"
            for label, values in (
                ("writes", self.mutates),
                ("constants:", self.constants),
                ("treats one by one the first dimension of", self.batched),
                ("treats one by one the sequences in", self.ragged),
            )
            if values
        ]
        count = f"{self.cases} cases"
        if self.dtypes:
            count += f" in {', '.join(self.dtypes)}"
        yield from ("; ".join([*facts, count]).capitalize() + ".", "")

    def _taken(self) -> list[tuple[str, list[str]]]:
        """Return what kernels always have to take, with the arguments that it is said of."""
        found: dict[str, list[str]] = {}
        for name, words in self.always_taken.items():
            found.setdefault(words, []).append(name)
        return list(found.items())


@dataclass(frozen=True, slots=True)
class OpCatalogue:
    """All ops, or some, by family and name."""

    ops: tuple[OpFacts, ...]

    @classmethod
    def of(cls, registry: Registry, names: Iterable[str] = ()) -> OpCatalogue:
        """Return the ops called ``names``, all of them if there are none.

        Raises: UnknownNameError: no installed plugin declares one of them.
        """
        wanted = [*names] or [*registry.ops]
        for name in wanted:
            if name not in registry.ops:
                raise UnknownNameError("op", name, registry.ops)
        facts = (OpFacts.of(registry, name) for name in wanted)
        return cls(tuple(sorted(facts, key=lambda op: (op.provider, op.family, op.name))))

    def to_json(self) -> str:
        """Return the facts as a JSON list."""
        return json.dumps([asdict(op) for op in self.ops], indent=2)

    def __str__(self) -> str:
        if len(self.ops) == 1:
            return "\n".join(self.ops[0].lines())
        lines = [f"{len(self.ops)} ops, {sum(op.cases for op in self.ops)} cases"]
        for (provider, family), members in groupby(self.ops, _family):
            lines += ["", f"{family}  ({provider})"]
            for op in members:
                lines.append(f"  {op.name}: {op.description.partition(chr(10))[0]}")
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """Return a page about all ops."""
        total = sum(op.cases for op in self.ops)
        lines = [
            "# Ops",
            "",
            f"{len(self.ops)} ops are defined, with {total:,} distinct cases to check kernels on. "
            "The page is written by `interposer ops --markdown` from the docstrings of "
            "the references and from their cases.",
            "",
            "A kernel can refuse what the dims of a request state. What is *always taken* no "
            "request states: every kernel has to do with it. Each tensor may begin at any element "
            "of a storage, so no address is known to be a multiple of more than an element's size. "
            "Tensors that are not named there are dense, and those of one call do not overlap.",
            "",
        ]
        for (_, family), members in groupby(self.ops, _family):
            lines += [f"## {family.replace('_', ' ').capitalize()}", ""]
            for op in members:
                lines += op.markdown()
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _family(op: OpFacts) -> tuple[str, str]:
    return op.provider, op.family


def _paragraphs(docstring: str) -> Iterator[str]:
    """Yield a docstring as Markdown: its sections as bold words, their entries as lists."""
    for line in docstring.splitlines():
        section, argument = _SECTION.match(line), _ARGUMENT.match(line)
        if section and section[1] in ("Args", "Dims") and not section[2]:
            yield from ("", f"**{section[1]}**", "")
        elif section:
            yield from ("", f"**{section[1]}** {section[2]}")
        elif argument:
            yield f"- `{argument[1]}`: {argument[2]}"
        else:
            yield line
    yield ""
