"""The tasks of an examination."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

TaskName = Literal["plugin", "target", "platform", "predicate", "model", "kernel"]


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to find out about a distribution's code.

    Attributes:
        name: what is done.

            - ``plugin`` imports ``value``, ``"package.plugin"`` or ``"package.plugin:attribute"``,
              of the entry point ``name``, takes its records and checks them. The finding's facts
              hold the ``platforms`` that it declares, each with ``name`` and ``score``.
            - ``target`` loads every import string in ``targets``.
            - ``platform`` loads the class ``target``, probes with it and lists its devices.
            - ``predicate`` asks ``target``, or its attribute ``member``, about ``request``.
            - ``model`` has the family ``target`` parse the content of config.json, ``config``.
            - ``kernel`` compares ``target``, with ``prepare``, to the reference of ``op`` for
              ``dtype`` and ``dims`` on ``device``. ``plugin`` and ``kernel`` name the record
              whose requirements choose the cases; ``platform`` and ``capability`` are what those
              are judged for.
        arguments: JSON values by name.
    """

    name: TaskName
    arguments: Mapping[str, Any]
