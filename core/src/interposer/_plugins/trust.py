"""Trust in distributions: an allow list, and a lock file that pins the code of plugins."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.utils import canonicalize_name
from pydantic import AfterValidator, Field, ValidationError

from interposer._config.config import Config, config_sources
from interposer._config.file_access import irregular
from interposer._config.rules import Exact, first_fault
from interposer._config.storage import checksum, write_text
from interposer._contract.errors import LockError, StorageError, UnknownNameError, install_command
from interposer._contract.verdict import Verdict
from interposer._validation.compatibility import installed_version
from interposer._validation.distribution import STANDARD, Distribution

_FILE = "interposer.lock"
_EDITABLE = "editable"
_MOST_NAMED = 5


def allowed(config: Config, distributions: Iterable[Distribution]) -> dict[str, Verdict]:
    """Return, by name, whether ``Config.plugins`` allows each distribution to provide plugins.

    Parts of the SDK are always allowed.

    Raises: UnknownNameError: the allow list names a distribution that is not in ``distributions``.
    """
    installed_names = {distribution.name for distribution in distributions}
    if config.plugins is None:
        return dict.fromkeys(installed_names, Verdict.accept())
    listed = {str(canonicalize_name(name)) for name in config.plugins}
    unknown = sorted(listed - installed_names - STANDARD)
    if unknown:
        hint = "Try: install it, or take it off the list."
        raise UnknownNameError(
            "distribution", unknown[0], installed_names, hint, "in Config.plugins"
        )
    reason = "the allow list lacks it" if listed else "the configuration allows no plugins"
    return {
        name: Verdict.accept() if name in listed | STANDARD else Verdict.refuse(reason)
        for name in installed_names
    }


def _canonical(name: str) -> str:
    if canonicalize_name(name) != name:
        raise ValueError(f"not normalized; write {canonicalize_name(name)!r}")
    return name


class LockedDistribution(Exact):
    """An entry of the lock file: name, version and content hash of one distribution.

    ``record_hash`` is ``Distribution.fingerprint``. Editable installations change with every edit,
    so the hash is ``"editable"``: by name and version only.
    """

    name: Annotated[str, Field(min_length=1), AfterValidator(_canonical)]
    version: Annotated[str, Field(min_length=1)]
    record_hash: Annotated[str, Field(pattern=r"^([0-9a-f]{64}|editable)$")]


def _distinct(distributions: tuple[LockedDistribution, ...]) -> tuple[LockedDistribution, ...]:
    counts = Counter(entry.name for entry in distributions)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"{', '.join(twice)} listed twice")
    return distributions


class Lock(Exact):
    """The distributions with allowed plugins, each with a hash of the content.

    The file is formatted JSON, sorted by name, with a checksum over the other fields, and is meant
    to be committed.
    """

    version: Literal[1] = 1
    distributions: Annotated[tuple[LockedDistribution, ...], AfterValidator(_distinct)] = ()

    @classmethod
    def of(cls, distributions: Iterable[Distribution]) -> Lock:
        """Create a lock of the given installed distributions.

        Raises: LockError: a distribution has unusable metadata, altered files, or the same name as
            another.
        """
        installed = sorted(dict.fromkeys(distributions), key=lambda d: d.name)
        for distribution in installed:
            if distribution.problem:
                raise LockError(
                    f"The distribution in {distribution.location} cannot be locked: "
                    f"{distribution.problem}.\n"
                    "Try: uninstall it, then interposer lock"
                )
        problems = [
            *_duplicates(installed),
            *(problem for distribution in installed for problem in _alterations(distribution)),
        ]
        if problems:
            raise _lock_error("The installed plugins cannot be locked.", problems)
        entries = (
            LockedDistribution(name=d.name, version=d.version, record_hash=_locked_hash(d))
            for d in installed
        )
        return cls(distributions=tuple(entries))

    @classmethod
    def read(cls, path: Path) -> Lock:
        """Read a lock file.

        Raises: LockError: the file is missing, was edited by hand, or is no lock file.
        """
        if fault := irregular(path):
            raise LockError(_unusable(path, f"cannot be read: it {fault}"))
        try:
            fields: Any = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(fields, dict):
                raise LockError(_unusable(path, "is not a JSON object"))
            # The checksum covers every other field.
            if fields.pop("checksum", None) != checksum(fields):
                raise LockError(_unusable(path, "was changed: content and checksum differ"))
            return cls.model_validate_json(json.dumps(fields))
        except FileNotFoundError:
            raise LockError(_unusable(path, "does not exist")) from None
        except ValidationError as error:
            raise LockError(_unusable(path, first_fault(error))) from error
        # ``LockError`` is a ``ValueError``, which the next clause would wrap once more.
        except LockError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise LockError(_unusable(path, f"cannot be read: {error}")) from error

    def write(self, path: Path) -> None:
        """Replace the lock file atomically.

        Raises: LockError: the file cannot be written.
        """
        fields = self.model_dump(mode="json")
        fields["distributions"].sort(key=itemgetter("name"))
        fields["checksum"] = checksum(fields)
        try:
            write_text(path, json.dumps(fields, indent=2) + "\n")
        except StorageError as error:
            raise LockError(str(error)) from error

    def check(self, distributions: Iterable[Distribution]) -> None:
        """Check that names, versions and files of ``distributions`` match the lock.

        A locked distribution may be excluded by the policy, but must be installed.

        Raises: LockError: the text names every difference.
        """
        locked = {entry.name: entry for entry in self.distributions}
        installed = sorted(dict.fromkeys(distributions), key=lambda d: (d.name, d.version))
        problems: list[_Problem] = []
        for distribution in installed:
            difference = _difference(distribution, locked.get(distribution.name))
            problems += [_Problem(difference)] if difference else _alterations(distribution)
        problems += _duplicates(installed)
        problems += [
            _Problem(f"{name} {locked[name].version} is locked, but not installed")
            for name in sorted(locked.keys() - {d.name for d in installed})
            # A locked plugin that the policy excludes is installed, but not in ``distributions``.
            if installed_version(name) is None
        ]
        if problems:
            raise _lock_error("The installed plugins are not the locked ones.", problems)


def lock_path(config: Config) -> Path:
    """Return the path of the lock file: next to the project file, or in the working directory."""
    files = [Path(source.path) for source in config_sources() if source.name == "project file"]
    return (files[0].parent if files else Path.cwd()) / _FILE


def check_lock(config: Config, distributions: Iterable[Distribution]) -> None:
    """Check that the installed ``distributions`` match the lock file of the configuration.

    Raises: LockError: the distributions differ, or there is no usable lock file.
    """
    Lock.read(lock_path(config)).check(distributions)


def _locked_hash(distribution: Distribution) -> str:
    return _EDITABLE if distribution.editable else distribution.fingerprint


@dataclass(frozen=True, slots=True)
class _Problem:
    """A difference from the lock file: one line of an error text, and a remedy."""

    line: str
    remedy: str = ""


def _lock_error(head: str, problems: Iterable[_Problem]) -> LockError:
    remedies = dict.fromkeys(problem.remedy for problem in problems)
    # Suggest `interposer lock` only if no problem needs a remedy first.
    default_remedy = "install the locked versions"
    if [*remedies] == [""]:
        default_remedy += ", or lock the installed ones: interposer lock"
    lines = "\n  ".join([head, *(problem.line for problem in problems)])
    return LockError(f"{lines}\nTry: {'; '.join(remedy or default_remedy for remedy in remedies)}")


def _duplicates(distributions: Iterable[Distribution]) -> Iterator[_Problem]:
    places: dict[str, list[str]] = {}
    for distribution in distributions:
        places.setdefault(distribution.name, []).append(distribution.location)
    for name, locations in sorted(places.items()):
        if len(locations) > 1:
            line = f"{name} is installed {len(locations)} times: in {' and in '.join(locations)}"
            yield _Problem(line, f"uninstall {name} until one is left")


def _alterations(distribution: Distribution) -> Iterator[_Problem]:
    altered = distribution.altered_files()
    if altered:
        num_more = len(altered) - _MOST_NAMED
        listed_files = ", ".join(altered[:_MOST_NAMED])
        listed_files += f" and {num_more} more" if num_more > 0 else ""
        name = f"{distribution.name} {distribution.version}"
        command = install_command(distribution.name, "--force-reinstall")
        line = f"{name} was altered after it was installed: {listed_files}"
        yield _Problem(line, f"reinstall it: {command}")


def _difference(distribution: Distribution, locked: LockedDistribution | None) -> str:
    """Describe how an installed distribution differs from its locked entry, or return ""."""
    name = f"{distribution.name} {distribution.version}"
    if locked is None:
        return f"{name} is installed, but not locked"
    if distribution.version != locked.version:
        versions = f"locked at {locked.version}, installed is {distribution.version}"
        return f"{distribution.name} is {versions}"
    if distribution.editable and locked.record_hash != _EDITABLE:
        return f"{name} is installed as editable, but was not locked as editable"
    if not distribution.editable and locked.record_hash == _EDITABLE:
        return f"{name} was locked as editable and no longer is"
    if _locked_hash(distribution) != locked.record_hash:
        return f"{name} has other files than when it was locked"
    return ""


def _unusable(path: Path, reason: str) -> str:
    return f"{path} {reason}.\nTry: interposer lock, which writes it"
