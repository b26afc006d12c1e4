"""The code of one plugin: tried in the sandbox, then loaded once."""

from __future__ import annotations

from typing import Any

from interposer._config.config import Config
from interposer._contract.errors import FOREIGN_ERRORS, PluginError, described
from interposer._contract.records import load_target
from interposer._contract.verdict import Verdict
from interposer._plugins.plugins import Plugin, Plugins
from interposer._sandbox.examiner import examine
from interposer._sandbox.task import Finding, Task
from interposer._sandbox.tasks import perform


class PluginCode:
    """What import strings of a plugin's records name.

    Args:
        driver: what tells apart the drivers that the code may meet.
    """

    def __init__(self, plugins: Plugins, plugin: Plugin, config: Config, driver: str) -> None:
        self.plugin = plugin
        self._plugins = plugins
        self._config = config
        self._driver = driver
        self._loaded: dict[str, Any] = {}
        self._hanging: dict[str, Verdict] = {}

    def load(self, target: str) -> Any:
        """Return the object of an import string.

        Raises: PluginError: it cannot be imported, or must not be.
        """
        if target not in self._loaded:
            self._loaded[target] = self._load(target)
        return self._loaded[target]

    def trial(self, task: Task) -> Verdict:
        """Say whether this process may run what ``task`` runs; parts of the SDK are trusted."""
        installed = self.plugin.source.installed
        if installed is None or installed.standard:
            return Verdict.accept()
        return self.examine(task)

    def examine(self, task: Task) -> Verdict:
        """Return what an examination found, remembered where it can be."""
        installed = self.plugin.source.installed
        if installed is None:
            return perform(task).verdict
        asked = str(task.arguments.get("target"))
        if task.name == "predicate" and asked in self._hanging:
            return self._hanging[asked]
        finding = examine(installed, task, self._config, driver=self._driver)
        tell_probed(self._plugins, self.plugin.name, task, finding)
        if task.name == "predicate" and "limit_seconds" in finding.facts:
            self._hanging[asked] = finding.verdict  # it is not waited for at every request
        return finding.verdict

    def _load(self, target: str) -> Any:
        plugin = self.plugin
        verdict = self.trial(Task("target", {"targets": [target]}))
        cause: BaseException | None = None
        if verdict:
            try:
                return load_target(target)
            except FOREIGN_ERRORS as error:
                verdict, cause = Verdict.refuse(described(error)), error
        raise PluginError(
            plugin.name,
            plugin.source.origin,
            f"{target!r} cannot be loaded: {verdict.reason}",
            f"mend or reinstall it, or disable it: INTERPOSER_DISABLE={plugin.name}",
            verdict.traceback,
        ) from cause


def tell_probed(plugins: Plugins, plugin: str, task: Task, finding: Finding) -> None:
    """Tell the observers of an examination, if it was not a remembered one."""
    if finding.span is None:
        return
    plugins.observe(
        "interposer_finished",
        activity="probe",
        subject=f"{plugin} {task.name}",
        start_ns=finding.span[0],
        end_ns=finding.span[1],
        facts={"accepted": finding.verdict.accepted, "reason": finding.verdict.reason},
    )
