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
from interposer._contract.errors import LockError, StorageError, UnknownNameError
from interposer._contract.verdict import Verdict
from interposer._validation.compatibility import installed_version
from interposer._validation.distribution import STANDARD, Distribution

_FILE = "interposer.lock"
_EDITABLE = "editable"
_MOST_NAMED = 5


def allowed(config: Config, distributions: Iterable[Distribution]) -> dict[str, Verdict]:
    """Return, by name, whether ``Config.plugins`` lets each distribution provide plugins.

    The parts of the SDK itself are always let in.

    Raises: UnknownNameError: the allow list names a distribution that is not among them.
    """
    known = {distribution.name for distribution in distributions}
    if config.plugins is None:
        return dict.fromkeys(known, Verdict.accept())
    listed = {str(canonicalize_name(name)) for name in config.plugins}
    unknown = sorted(listed - known - STANDARD)
    if unknown:
        hint = "Try: install it, or take it off the list."
        raise UnknownNameError("distribution", unknown[0], known, hint, "in Config.plugins")
    reason = "the allow list lacks it" if listed else "the configuration allows no plugins"
    return {
        name: Verdict.accept() if name in listed | STANDARD else Verdict.refuse(reason)
        for name in known
    }


def _canonical(name: str) -> str:
    if canonicalize_name(name) != name:
        raise ValueError(f"not normalized; write {canonicalize_name(name)!r}")
    return name


class LockedDistribution(Exact):
    """One distribution as it was locked.

    ``record_hash`` is ``Distribution.fingerprint``. An editable installation changes with every
    edit, so it is locked as ``"editable"``: by name and version only.
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
    """The distributions whose plugins may be used, with their exact content.

    The file is pretty JSON with a checksum over the rest, sorted by name, made to be committed.
    """

    version: Literal[1] = 1
    distributions: Annotated[tuple[LockedDistribution, ...], AfterValidator(_distinct)] = ()

    @classmethod
    def of(cls, distributions: Iterable[Distribution]) -> Lock:
        """Return the lock of what is installed.

        Raises: LockError: the metadata of one is unusable, its files were altered, or another
            has its name.
        """
        found = sorted(dict.fromkeys(distributions), key=lambda d: d.name)
        for each in found:
            if each.problem:
                raise LockError(
                    f"What is installed in {each.location} cannot be locked: {each.problem}.\n"
                    "Try: uninstall it, then interposer lock"
                )
        problems = [*_twins(found), *(problem for each in found for problem in _alterations(each))]
        if problems:
            raise _lock_error("What is installed cannot be locked.", problems)
        entries = (
            LockedDistribution(name=d.name, version=d.version, record_hash=_locked_hash(d))
            for d in found
        )
        return cls(distributions=tuple(entries))

    @classmethod
    def read(cls, path: Path) -> Lock:
        """Return the lock in a file.

        Raises: LockError: the file is missing, was edited by hand, or is no lock file.
        """
        if fault := irregular(path):
            raise LockError(_unusable(path, f"cannot be read: it {fault}"))
        try:
            fields: Any = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(fields, dict):
                raise LockError(_unusable(path, "is not a JSON object"))
            if fields.pop("checksum", None) != checksum(fields):
                raise LockError(_unusable(path, "was changed: content and checksum differ"))
            return cls.model_validate_json(json.dumps(fields))
        except FileNotFoundError:
            raise LockError(_unusable(path, "does not exist")) from None
        except ValidationError as error:
            raise LockError(_unusable(path, first_fault(error))) from error
        except LockError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise LockError(_unusable(path, f"cannot be read: {error}")) from error

    def write(self, path: Path) -> None:
        """Replace the file in one step.

        Raises: LockError: it cannot be written.
        """
        fields = self.model_dump(mode="json")
        fields["distributions"].sort(key=itemgetter("name"))
        fields["checksum"] = checksum(fields)
        try:
            write_text(path, json.dumps(fields, indent=2) + "\n")
        except StorageError as error:
            raise LockError(str(error)) from error

    def check(self, distributions: Iterable[Distribution]) -> None:
        """Return if ``distributions`` are the locked ones with their files as installed.

        What is locked may be left out by the policy, but must be installed.

        Raises: LockError: they differ; the text names every difference.
        """
        locked = {entry.name: entry for entry in self.distributions}
        present = sorted(dict.fromkeys(distributions), key=lambda d: (d.name, d.version))
        problems: list[_Problem] = []
        for found in present:
            difference = _difference(found, locked.get(found.name))
            problems += [_Problem(difference)] if difference else _alterations(found)
        problems += _twins(present)
        problems += [
            _Problem(f"{name} {locked[name].version} is locked, but not installed")
            for name in sorted(locked.keys() - {d.name for d in present})
            if installed_version(name) is None
        ]
        if problems:
            raise _lock_error("The installed plugins are not the locked ones.", problems)


def lock_path(config: Config) -> Path:
    """Return where the lock file is: beside the project file, else in the working directory."""
    files = [Path(source.path) for source in config_sources() if source.name == "project file"]
    return (files[0].parent if files else Path.cwd()) / _FILE


def check_lock(config: Config, distributions: Iterable[Distribution]) -> None:
    """Return if ``distributions`` are those of the lock file.

    Raises: LockError: they are not, or there is no usable lock file.
    """
    Lock.read(lock_path(config)).check(distributions)


def _locked_hash(found: Distribution) -> str:
    return _EDITABLE if found.editable else found.fingerprint


@dataclass(frozen=True, slots=True)
class _Problem:
    """A line of what is wrong; ``mend`` is what helps against this one alone."""

    line: str
    mend: str = ""


def _lock_error(head: str, problems: Iterable[_Problem]) -> LockError:
    mends = dict.fromkeys(problem.mend for problem in problems)
    # What cannot be locked as it is must not be offered to be.
    other = "install what is locked"
    if [*mends] == [""]:
        other += ", or lock what is installed: interposer lock"
    lines = "\n  ".join([head, *(problem.line for problem in problems)])
    return LockError(f"{lines}\nTry: {'; '.join(mend or other for mend in mends)}")


def _twins(distributions: Iterable[Distribution]) -> Iterator[_Problem]:
    places: dict[str, list[str]] = {}
    for found in distributions:
        places.setdefault(found.name, []).append(found.location)
    for name, locations in sorted(places.items()):
        if len(locations) > 1:
            line = f"{name} is installed {len(locations)} times: in {' and in '.join(locations)}"
            yield _Problem(line, f"uninstall {name} until one is left")


def _alterations(found: Distribution) -> Iterator[_Problem]:
    altered = found.altered_files()
    if altered:
        more = len(altered) - _MOST_NAMED
        named = ", ".join(altered[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        line = f"{found.name} {found.version} was altered after it was installed: {named}"
        yield _Problem(line, f"reinstall it: pip install --force-reinstall {found.name}")


def _difference(found: Distribution, locked: LockedDistribution | None) -> str:
    """Return how the metadata differs from what was locked, or nothing."""
    name = f"{found.name} {found.version}"
    if locked is None:
        return f"{name} is installed, but not locked"
    if found.version != locked.version:
        return f"{found.name} is locked at {locked.version}, installed is {found.version}"
    if found.editable and locked.record_hash != _EDITABLE:
        return f"{name} is editable, what was locked is not"
    if not found.editable and locked.record_hash == _EDITABLE:
        return f"{name} was locked as editable and no longer is"
    if _locked_hash(found) != locked.record_hash:
        return f"{name} has other files than when it was locked"
    return ""


def _unusable(path: Path, reason: str) -> str:
    return f"{path} {reason}.\nTry: write it from what is installed: interposer lock"
