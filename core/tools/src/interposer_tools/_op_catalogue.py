"""The catalogue of installed ops, printed by ``interposer ops`` as text, JSON or Markdown."""

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
_SHOWN = (
    *("dims", "mutates", "constants", "batched", "ragged", "differentiable"),
    *("properties", "dtypes", "kernels"),
)


@dataclass(frozen=True, slots=True)
class OpFacts:
    """The declared properties of one op, for display.

    Attributes:
        family: name of the defining module, without the package.
        description: docstring of the reference.
        dims: names of the dims in a request for this op.
        always_taken: by argument, the layouts that every kernel must accept for any request.
        cases: number of distinct test cases over all dtypes.
        dtypes: dtypes of the test cases; empty if unknown before the cases are built.
        kernels: kernels of all platforms as ``provider/name``, without the reference.
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
    differentiable: tuple[str, ...]
    properties: tuple[str, ...]
    dtypes: tuple[str, ...]
    cases: int
    kernels: tuple[str, ...]

    @classmethod
    def of(cls, registry: Registry, name: str) -> OpFacts:
        """Collect the facts about a registered op.

        Raises: PluginError: the reference cannot be imported.
        """
        entry = registry.ops[name]
        candidates = registry.candidates("kernel", name)
        (reference,) = (c for c in candidates if isinstance(c.record, OpEntry))
        op: CustomOp[..., Any] = registry.load(reference, entry.target)
        kernels = (c for c in candidates if c is not reference)
        # Only a ``CaseSpace`` knows dtypes and layouts without building its cases.
        space = op.cases
        dtypes = space.dtypes if isinstance(space, CaseSpace) else ()
        # All cases of an op have the same names of dims, so the first case suffices below.
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
            op.differentiable,
            tuple(sorted(entry.properties)),
            tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
            len(planned),
            tuple(sorted(kernel.qualified_name for kernel in kernels)),
        )

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text that ``interposer ops NAME`` prints."""
        yield f"{self.schema}  ({self.provider})"
        yield from ("", *self.description.splitlines(), "")
        for label in _SHOWN:
            values = getattr(self, label)
            if values:
                yield f"{label}: {', '.join(values)}"
        for words, names in self._arguments_by_layout():
            yield f"every kernel takes {', '.join(names)}: {words}"
        yield f"cases: {self.cases}"

    def markdown(self) -> Iterator[str]:
        """Yield the Markdown section about this op."""
        yield from (f"### `{self.name}`", "", f"`{self.schema}`", "")
        yield from _paragraphs(self.description)
        if self.always_taken:
            yield from ("**Always taken**", "")
            for words, names in self._arguments_by_layout():
                yield f"- {', '.join(f'`{name}`' for name in names)}: {words}"
            yield ""
        facts = [
            f"{label} {', '.join(f'`{value}`' for value in values)}"
            for label, values in (
                ("writes", self.mutates),
                ("constants:", self.constants),
                ("treats one by one the first dimension of", self.batched),
                ("treats one by one the sequences in", self.ragged),
                ("has gradients of", self.differentiable),
            )
            if values
        ]
        count = f"{self.cases} cases"
        if self.dtypes:
            count += f" in {', '.join(self.dtypes)}"
        yield from ("; ".join([*facts, count]).capitalize() + ".", "")

    def _arguments_by_layout(self) -> list[tuple[str, list[str]]]:
        """Group ``always_taken`` by layout: (description, names of arguments)."""
        names_by_words: dict[str, list[str]] = {}
        for name, words in self.always_taken.items():
            names_by_words.setdefault(words, []).append(name)
        return list(names_by_words.items())


@dataclass(frozen=True, slots=True)
class OpCatalogue:
    """A list of ops, sorted by family and name."""

    ops: tuple[OpFacts, ...]

    @classmethod
    def of(cls, registry: Registry, names: Iterable[str] = ()) -> OpCatalogue:
        """Collect the ops ``names``, or all installed ops if ``names`` is empty.

        Raises: UnknownNameError: no installed plugin declares an op of ``names``.
        """
        op_names = [*names] or [*registry.ops]
        for name in op_names:
            if name not in registry.ops:
                raise UnknownNameError("op", name, registry.ops)
        facts = (OpFacts.of(registry, name) for name in op_names)
        return cls(tuple(sorted(facts, key=lambda op: (op.provider, op.family, op.name))))

    def to_json(self) -> str:
        """Return a JSON list with one object per op."""
        return json.dumps([asdict(op) for op in self.ops], indent=2)

    def __str__(self) -> str:
        if len(self.ops) == 1:
            return "\n".join(self.ops[0].lines())
        lines = [f"{len(self.ops)} ops, {sum(op.cases for op in self.ops)} cases"]
        for (provider, family), members in groupby(self.ops, _family):
            lines += ["", f"{family}  ({provider})"]
            for op in members:
                # chr(10) is a newline: in Python 3.11, an f-string expression has no backslashes.
                lines.append(f"  {op.name}: {op.description.partition(chr(10))[0]}")
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """Return a Markdown page about the ops."""
        total = sum(op.cases for op in self.ops)
        lines = [
            "# Ops",
            "",
            f"You can write kernels for these {len(self.ops)} ops. Together they have {total:,} "
            "distinct test cases. `interposer ops --markdown` generates the page from the "
            "references and their cases.",
            "",
            "A kernel can refuse a request because of its dims. Under *Always taken* stand "
            "variations that no request states, so your kernel must accept all of them. A tensor "
            "can begin at any element of its storage: rely on an alignment of one element only. "
            "All other tensors are dense, and the tensors of one call do not overlap.",
            "",
        ]
        for (_, family), members in groupby(self.ops, _family):
            lines += [f"## {family.replace('_', ' ').capitalize()}", ""]
            for op in members:
                lines += op.markdown()
        # Sections end with blank lines; collapse repeated ones.
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _family(op: OpFacts) -> tuple[str, str]:
    return op.provider, op.family


def _paragraphs(docstring: str) -> Iterator[str]:
    """Convert a docstring to Markdown: sections become bold words, arguments become list items."""
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
