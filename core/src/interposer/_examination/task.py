"""Tasks of the examination: the plugin code to run in a sandbox, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

TaskName = Literal["plugin", "target", "platform", "predicate", "model", "kernel"]


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of plugin code to run in the sandbox, such as a probe, with its arguments.

    Attributes:
        name: the kind of examination.

            - ``plugin`` imports ``value``, ``"package.plugin"`` or ``"package.plugin:attribute"``,
              of the entry point ``name``, takes its records and checks them. The finding's facts
              hold the declared ``platforms``, each with ``name`` and ``score``.
            - ``target`` loads every import string in ``targets``.
            - ``platform`` loads the class ``target``, calls its probe and lists its devices.
            - ``predicate`` calls ``target``, or its attribute ``member``, with ``request``.
            - ``model`` lets the family ``target`` parse ``config``, the content of config.json.
            - ``kernel`` compares ``target``, with ``prepare``, to the reference of ``op`` for
              ``dtype`` and ``dims`` on ``device``. ``plugin`` and ``kernel`` name the record
              whose requirements choose the cases, which are judged for ``platform`` and
              ``capability``.
        arguments: JSON values by name.
    """

    name: TaskName
    arguments: Mapping[str, Any]
