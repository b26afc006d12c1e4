"""A lock file holds what is installed, and no edit of it goes unnoticed."""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interposer.errors import LockError
from interposer.tooling import Distribution, Lock
from interposer_tools._lock_writer import lock_of, write_lock

CODE = b"def fast(x):\n    return x\n"


def installed(site: Path, name: str, version: str = "1.0") -> Distribution:
    """Return a distribution of one module, installed below ``site`` with its hash."""
    path = f"{name.replace('-', '_')}/kernels.py"
    (site / path).parent.mkdir(parents=True)
    (site / path).write_bytes(CODE)
    digest = hashlib.sha256(CODE)
    code = base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
    record = f"{path},sha256={code},{len(CODE)}\n"
    return Distribution(
        name, version, digest.hexdigest(), (), str(site), editable=False, record=record
    )


def editable(name: str, version: str = "1.0") -> Distribution:
    return Distribution(name, version, "0" * 64, (), "/somewhere/src", True)


def named(*names: str) -> list[Distribution]:
    return [Distribution(name, "1.0", "0" * 64, (), "", False) for name in names]


names = st.from_regex(r"[a-z0-9]+(-[a-z0-9]+){0,2}", fullmatch=True)
hashes = st.from_regex(r"[0-9a-f]{64}", fullmatch=True) | st.just("editable")
versions = st.text(min_size=1, max_size=10)
locks = st.dictionaries(names, st.tuples(versions, hashes), max_size=4).map(
    lambda entries: Lock.of(
        Distribution(name, version, digest, (), "", digest == "editable")
        for name, (version, digest) in entries.items()
    )
)


def test_a_lock_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = [
        installed(tmp_path, "zeta"),
        installed(tmp_path, "acme-norms", "2.1"),
        editable("mine"),
    ]
    lock = lock_of(found)
    path = tmp_path / "project" / "interposer.lock"
    write_lock(lock, path)
    assert Lock.read(path) == lock
    assert [entry.name for entry in lock.distributions] == ["acme-norms", "mine", "zeta"]
    assert lock_of(reversed(found)) == lock
    fields = json.loads(path.read_text())
    assert fields["distributions"][0] == {
        "name": "acme-norms",
        "version": "2.1",
        "record_hash": found[1].fingerprint,
    }
    assert fields["distributions"][1]["record_hash"] == "editable"
    lock.check(found)


@given(lock=locks)
def test_any_lock_survives_its_file(lock: Lock) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "interposer.lock")
        write_lock(lock, path)
        again = Lock.read(path)
    assert set(again.distributions) == set(lock.distributions)
    assert again.distributions == tuple(sorted(lock.distributions, key=lambda entry: entry.name))


@given(data=st.data())
def test_no_edit_of_a_lock_goes_unnoticed(data: st.DataObject) -> None:
    lock = Lock.of(named("acme", "zeta"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "interposer.lock")
        write_lock(lock, path)
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
        assert "Try: write it from what is installed: interposer lock" in complaint


def test_unusable_metadata_cannot_be_locked() -> None:
    broken = Distribution("unknown", "0", "0" * 64, (), "/site", False, "its metadata is nonsense")
    with pytest.raises(LockError, match="/site cannot be locked: its metadata is nonsense"):
        lock_of([broken])


def test_what_was_altered_cannot_be_locked(tmp_path: Path) -> None:
    found = [installed(tmp_path, "acme")]
    (tmp_path / "acme" / "kernels.py").write_bytes(b"raise SystemExit\n")
    with pytest.raises(LockError) as caught:
        lock_of(found)
    _, line, mend = str(caught.value).splitlines()
    assert line == "  acme 1.0 was altered after it was installed: acme/kernels.py"
    assert mend == "Try: reinstall it: pip install --force-reinstall acme"


def test_two_distributions_of_one_name_cannot_be_locked() -> None:
    one, other = (Distribution("acme", "1.0", "0" * 64, (), place, False) for place in ("/a", "/b"))
    assert len(lock_of([one, one]).distributions) == 1
    with pytest.raises(LockError) as caught:
        lock_of([one, other])
    assert "acme is installed 2 times: in /a and in /b" in str(caught.value)
    assert "Try: uninstall acme until one is left" in str(caught.value)


def test_a_lock_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(LockError, match="cannot be written"):
        write_lock(Lock(), tmp_path)
