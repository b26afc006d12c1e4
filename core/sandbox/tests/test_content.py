"""States of files are told apart, by content or by size and time."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

from interposer_sandbox import digest, file_facts, is_altered, surroundings


def test_a_digest_covers_the_contents(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_text("x")
    first = digest([*files, tmp_path / "none"])
    assert first == digest(reversed(files))
    files[1].write_text("y")
    assert digest(files) not in ("", first)
    assert digest([tmp_path / "none"]) == ""


def test_a_file_that_differs_from_its_record_is_altered(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("x")

    def recorded(algorithm: str) -> str:
        facts_by_name = hashlib.new(algorithm, b"x").digest()
        return f"{algorithm}={base64.urlsafe_b64encode(facts_by_name).decode().rstrip('=')}"

    assert not is_altered(file, recorded("sha256"))
    assert not is_altered(file, recorded("sha512"))
    assert is_altered(file, recorded("md5"))
    assert is_altered(file, "")
    assert is_altered(tmp_path / "none", recorded("sha256"))
    file.write_text("y")
    assert is_altered(file, recorded("sha256"))


def test_facts_cover_files_with_code(tmp_path: Path) -> None:
    for path in ("a.py", "b/c.py", "b/__pycache__/c.pyc", ".git/config", "venv/pyvenv.cfg"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path)
    facts_by_name = {str(name): facts for name, *facts in file_facts(tmp_path)}
    assert facts_by_name.keys() >= {"/a.py", "/b/c.py"}
    assert not any(part in name for name in facts_by_name for part in ("pycache", "git", "venv"))
    before = facts_by_name["/a.py"]
    os.utime(tmp_path / "a.py", ns=(0, 0))
    assert {str(name): facts for name, *facts in file_facts(tmp_path)}["/a.py"] != before
    assert [name for name, *_ in file_facts(tmp_path / "a.py")] == ["a.py"]
    assert [*file_facts(tmp_path / "none")] == []


def test_surroundings_are_known() -> None:
    assert {"sandbox", "torch", "python", "machine", "processor"} == surroundings().keys()
    assert all(surroundings().values())
