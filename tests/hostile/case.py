"""One plugin of the pack: its files, and the refusal that it has to get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Literal

__all__ = ["Hostile", "Stage", "plugin", "provides"]

Stage = Literal[
    "attention",
    "discovery",
    "kernel",
    "layer",
    "lock",
    "model",
    "observer",
    "platform",
    "tie",
    "tuning",
]
"""The stage at which a plugin has to be refused, and its visit in ``visit.py``."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """A plugin that is broken or does harm.

    Attributes:
        name: the distribution is called ``hostile-<name>``, as its plugin is.
        files: sources by path inside the package, whose name stands for ``$package``.
        words: the reason of the refusal contains all of them, in any case.
        stage: where it is refused.
        plugin: name of the plugin, where it is not that of the distribution.
        value: of the entry point.
        requires: what the metadata require beside what a healthy plugin does.
        altered: content by path in the folder of the installation, to write over what was
            installed; None deletes it. ``$info`` stands for the folder of metadata.
        native: function of the library ``native.so`` that runs when it is loaded.
        beside: names of other cases that are installed with it.
        loads: its plugin module does no harm and is imported before it is refused.
        unnamed: its metadata have no usable name.
        needs_compiler: it cannot be made without one.
    """

    name: str
    files: Mapping[str, str]
    words: tuple[str, ...]
    stage: Stage = "discovery"
    plugin: str = ""
    value: str = "$package.plugin"
    requires: tuple[str, ...] = ()
    altered: Mapping[str, str | None] = field(default_factory=dict)
    native: str = ""
    beside: tuple[str, ...] = ()
    loads: bool = False
    unnamed: bool = False
    needs_compiler: bool = False

    @property
    def distribution(self) -> str:
        return f"hostile-{self.name}"

    @property
    def package(self) -> str:
        return self.distribution.replace("-", "_")

    @property
    def plugin_name(self) -> str:
        return self.plugin or self.distribution

    @property
    def listed_as(self) -> str:
        """Return the name that stands for it in an allow list."""
        return "unknown" if self.unnamed else self.distribution

    def filled(self, text: str) -> str:
        """Return ``text`` with the names of this case in it."""
        info = f"{self.package}-1.0.dist-info"
        return Template(text).substitute(package=self.package, name=self.name, info=info)

    def __str__(self) -> str:
        return self.name


HEAD = """
from interposer.hookspecs import hookimpl
from interposer.records import *
from interposer.requires import Requires

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_failed():
    pass


"""


def plugin(body: str) -> str:
    """Return a plugin module that states its API and then is ``body``."""
    return HEAD + body


def provides(*records: str) -> str:
    """Return a plugin module that provides ``records``, as expressions."""
    listed = "".join(f"        {record},\n" for record in records)
    return plugin(f"\n\n@hookimpl\ndef interposer_records():\n    return [\n{listed}    ]\n")
