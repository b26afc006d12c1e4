"""Only what the user lists, and only what was locked, may provide plugins."""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import importlib_metadata
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from interposer import Config
from interposer._config.storage import checksum
from interposer._plugins.trust import Lock, LockedDistribution, allowed, check_lock, lock_path
from interposer._validation.distribution import STANDARD, Distribution, read_distribution
from interposer.errors import LockError, UnknownNameError

Install = Callable[..., Distribution]

CODE = b"def fast(x):\n    return x\n"


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Return an installer of distributions with one module, to ``site`` below this folder."""

    def write(name: str, version: str = "1.0", code: bytes = CODE) -> Distribution:
        site, package = tmp_path / "site", name.replace("-", "_")
        info = f"{package}-{version}.dist-info"
        files = {
            f"{package}/kernels.py": code,
            f"{info}/METADATA": f"Name: {name}\nVersion: {version}\n".encode(),
        }
        lines = [f"{info}/RECORD,,"]
        for path, content in files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_bytes(content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            lines.append(f"{path},sha256={digest},{len(content)}")
        (site / info / "RECORD").write_text("\n".join(lines) + "\n")
        return read_distribution(importlib_metadata.Distribution.at(str(site / info)))

    return write


def editable(name: str, version: str = "1.0") -> Distribution:
    return Distribution(name, version, "0" * 64, (), "/somewhere/src", True)


def named(*names: str) -> list[Distribution]:
    return [Distribution(name, "1.0", "0" * 64, (), "", False) for name in names]


def test_without_a_list_every_distribution_is_allowed() -> None:
    verdicts = allowed(Config(), named("acme", "zeta", "interposer-ops"))
    assert list(map(bool, verdicts.values())) == [True] * 3


def test_a_list_allows_its_names_and_the_parts_of_the_sdk() -> None:
    config = Config(plugins=frozenset({"Acme_Norms"}))
    verdicts = allowed(config, named("acme-norms", "zeta", *STANDARD))
    assert {name for name, verdict in verdicts.items() if not verdict} == {"zeta"}
    assert verdicts["zeta"].reason == "the allow list lacks it"


@pytest.mark.parametrize("none", ["none", frozenset()])
def test_none_allows_the_parts_of_the_sdk_only(none: frozenset[str]) -> None:
    verdicts = allowed(Config(plugins=none), named("acme", "interposer-cpu", *STANDARD))
    assert {name for name, verdict in verdicts.items() if verdict} == STANDARD
    assert verdicts["acme"].reason == "the configuration allows no plugins"


def test_a_list_with_a_typo_raises_with_the_nearest() -> None:
    config = Config(plugins=frozenset({"acme-nroms", "zeta"}))
    with pytest.raises(UnknownNameError, match=r"'acme-nroms' in Config.plugins") as caught:
        allowed(config, named("zeta", "acme-norms"))
    assert caught.value.known == ["acme-norms", "zeta"]


def test_listing_a_part_of_the_sdk_that_is_not_there_is_no_typo() -> None:
    assert allowed(Config(plugins=frozenset({"interposer-models", "acme"})), named("acme"))


def test_a_lock_is_read_as_it_was_written(install: Install, tmp_path: Path) -> None:
    installed = [install("zeta"), install("acme-norms", "2.1"), editable("mine")]
    lock = Lock.of(installed)
    path = tmp_path / "project" / "interposer.lock"
    lock.write(path)
    assert Lock.read(path) == lock
    assert [entry.name for entry in lock.distributions] == ["acme-norms", "mine", "zeta"]
    assert Lock.of(reversed(installed)) == lock
    fields = json.loads(path.read_text())
    assert fields["distributions"][0] == {
        "name": "acme-norms",
        "version": "2.1",
        "record_hash": installed[1].fingerprint,
    }
    assert fields["distributions"][1]["record_hash"] == "editable"
    lock.check(installed)


names = st.from_regex(r"[a-z0-9]+(-[a-z0-9]+){0,2}", fullmatch=True)
hashes = st.from_regex(r"[0-9a-f]{64}", fullmatch=True) | st.just("editable")
versions = st.text(min_size=1, max_size=10)
locks = st.dictionaries(names, st.tuples(versions, hashes), max_size=4).map(
    lambda entries: Lock(
        distributions=tuple(
            LockedDistribution(name=name, version=version, record_hash=digest)
            for name, (version, digest) in entries.items()
        )
    )
)


@given(lock=locks)
def test_any_lock_survives_its_file(lock: Lock) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "interposer.lock")
        lock.write(path)
        again = Lock.read(path)
    assert set(again.distributions) == set(lock.distributions)
    assert again.distributions == tuple(sorted(lock.distributions, key=lambda entry: entry.name))


@given(data=st.data())
def test_every_edit_of_a_lock_is_detected(data: st.DataObject) -> None:
    lock = Lock.of(named("acme", "zeta"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "interposer.lock")
        lock.write(path)
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[place] = data.draw(st.integers(0, 255))
        else:
            del content[place:]
        path.write_bytes(content)
        try:
            again, complaint = Lock.read(path), ""
        except LockError as error:
            again, complaint = None, str(error)
    if again is not None:
        assert again == lock
    else:
        assert str(path) in complaint
        assert "Try: interposer lock, which writes it" in complaint


def signed(**fields: object) -> str:
    return json.dumps({**fields, "checksum": checksum(fields)})


ENTRY = {"name": "acme", "version": "1.0", "record_hash": "0" * 64}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot be read"),
        ("<<<<<<< HEAD", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "is not a JSON object"),
        ("{}", "content and checksum differ"),
        ('{"version": 1, "distributions": [], "checksum": NaN}', "content and checksum differ"),
        (signed(version=2, distributions=[]), "version: Input should be 1"),
        (signed(version=1, distributions=[], more=1), "more: Extra inputs"),
        (signed(version=1, distributions=[{**ENTRY, "name": "Acme"}]), "write 'acme'"),
        (signed(version=1, distributions=[{**ENTRY, "record_hash": "0"}]), "record_hash"),
        (signed(version=1, distributions=[ENTRY, ENTRY]), "acme listed twice"),
    ],
)
def test_an_invalid_lock_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "interposer.lock"
    path.write_text(text)
    with pytest.raises(LockError, match=reason) as caught:
        Lock.read(path)
    assert str(path) in str(caught.value)


def test_a_lock_that_is_missing_or_in_the_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LockError, match=r"interposer\.lock does not exist"):
        Lock.read(tmp_path / "interposer.lock")
    with pytest.raises(LockError, match="cannot be read"):
        Lock.read(tmp_path)
    with pytest.raises(LockError, match="cannot be written"):
        Lock().write(tmp_path)


def test_a_lock_names_no_distribution_twice() -> None:
    entry = LockedDistribution(name="acme", version="1.0", record_hash="editable")
    with pytest.raises(ValidationError, match="acme listed twice"):
        Lock(distributions=(entry, entry))


def test_unusable_metadata_cannot_be_locked() -> None:
    broken = Distribution("unknown", "0", "0" * 64, (), "/site", False, "its metadata is nonsense")
    with pytest.raises(LockError, match="/site cannot be locked: its metadata is nonsense"):
        Lock.of([broken])


def test_every_difference_is_named_at_once(install: Install, tmp_path: Path) -> None:
    before = [
        install("acme-same"),
        install("acme-newer", "1.0"),
        install("acme-rebuilt"),
        install("acme-altered"),
        install("acme-gone"),
        install("acme-developed"),
        editable("acme-released"),
    ]
    lock = Lock.of(before)
    lock.check(before)
    after = [
        before[0],
        install("acme-newer", "1.1"),
        install("acme-rebuilt", code=CODE + b"#"),
        before[3],
        editable("acme-developed"),
        install("acme-released"),
        install("acme-added"),
    ]
    (tmp_path / "site" / "acme_altered" / "kernels.py").write_bytes(b"raise SystemExit\n")
    with pytest.raises(LockError) as caught:
        lock.check(after)
    assert str(caught.value).splitlines() == [
        "The installed plugins are not the locked ones.",
        "  acme-added 1.0 is installed, but not locked",
        "  acme-altered 1.0 was altered after it was installed: acme_altered/kernels.py",
        "  acme-developed 1.0 is installed as editable, but was not locked as editable",
        "  acme-newer is locked at 1.0, installed is 1.1",
        "  acme-rebuilt 1.0 has other files than when it was locked",
        "  acme-released 1.0 was locked as editable and no longer is",
        "  acme-gone 1.0 is locked, but not installed",
        "Try: install the locked versions; reinstall it: "
        "pip install --force-reinstall acme-altered",
    ]


def test_a_distribution_that_the_policy_excludes_is_not_missing(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed_plugin, disabled = install("acme-used"), install("acme-disabled")
    lock = Lock.of([allowed_plugin, disabled])
    with pytest.raises(LockError, match=r"acme-disabled 1\.0 is locked, but not installed"):
        lock.check([allowed_plugin])
    monkeypatch.syspath_prepend(tmp_path / "site")
    lock.check([allowed_plugin])


def test_the_lock_is_next_to_the_project_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "project" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert lock_path(Config()) == inner / "interposer.lock"
    (tmp_path / "project" / "interposer.toml").write_text("locked = true\n")
    Config.refresh()
    assert lock_path(Config()) == tmp_path / "project" / "interposer.lock"


def test_the_lock_of_the_project_is_enforced(install: Install, tmp_path: Path) -> None:
    installed, config = [install("acme")], Config(locked=True)
    with pytest.raises(LockError, match="does not exist"):
        check_lock(config, installed)
    Lock.of(installed).write(lock_path(config))
    assert (tmp_path / "interposer.lock").is_file()
    check_lock(config, installed)
    with pytest.raises(LockError, match=r"zeta 1\.0 is installed, but not locked"):
        check_lock(config, [*installed, install("zeta")])


def test_an_altered_distribution_must_be_reinstalled_and_cannot_be_locked(
    install: Install, tmp_path: Path
) -> None:
    installed = [install("acme")]
    lock = Lock.of(installed)
    (tmp_path / "site" / "acme" / "kernels.py").write_bytes(b"raise SystemExit\n")
    for act in (lambda: lock.check(installed), lambda: Lock.of(installed)):
        with pytest.raises(LockError) as caught:
            act()
        _, line, mend = str(caught.value).splitlines()
        assert line == "  acme 1.0 was altered after it was installed: acme/kernels.py"
        assert mend == "Try: reinstall it: pip install --force-reinstall acme"


def test_two_distributions_of_one_name_are_refused() -> None:
    first, second = (
        Distribution("acme", "1.0", "0" * 64, (), place, False) for place in ("/a", "/b")
    )
    lock = Lock.of([first, first])
    lock.check([first, first])
    for act in (lambda: lock.check([first, second]), lambda: Lock.of([first, second])):
        with pytest.raises(LockError) as caught:
            act()
        assert "acme is installed 2 times: in /a and in /b" in str(caught.value)
        assert "Try: uninstall acme until one is left" in str(caught.value)
