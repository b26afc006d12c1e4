"""Facts of distributions are read from real metadata, whatever state it is in."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import importlib_metadata
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interposer._validation.distribution import Distribution, read_distribution

FILES = {
    "acme/__init__.py": b"",
    "acme/plugin.py": b"INTERPOSER_API = '>=1.0,<2'\n",
    "acme/kernels/__init__.py": b"def fast(x):\n    return x\n",
    "acme/_native.cpython-311-x86_64-linux-gnu.so": b"\x7fELF\x00",
    "acme/tables/a, b.json": b"{}",
}
METADATA = """Metadata-Version: 2.1
Name: Acme.Norms
Version: 1.0
Requires-Dist: interposer<2,>=0.1
Requires-Dist: torch>=2.11; python_version >= "3.11"

# Acme

Requires-Dist: nothing, this is the description
"""
INFO = "acme_norms-1.0.dist-info"


SCRIPTS = "[console_scripts]\nacme-norms = acme.plugin:main\n"


def contents(
    metadata: str = METADATA, files: Mapping[str, bytes] = FILES, scripts: str = SCRIPTS
) -> dict[str, bytes]:
    """Return the files of a wheel by path, RECORD last."""
    wheel = b"Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content_by_path = {
        **files,
        f"{INFO}/METADATA": metadata.encode(),
        f"{INFO}/WHEEL": wheel,
        f"{INFO}/entry_points.txt": scripts.encode(),
    }
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for name, content in content_by_path.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={digest}", len(content)])
    writer.writerow([f"{INFO}/RECORD", "", ""])
    return {**content_by_path, f"{INFO}/RECORD": lines.getvalue().encode()}


def unpack(site: Path, held: Mapping[str, bytes]) -> Path:
    for name, content in held.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return site


def read(site: Path) -> Distribution:
    (distribution,) = importlib_metadata.distributions(path=[str(site)])
    return read_distribution(distribution)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder that a wheel was unpacked to."""
    return unpack(tmp_path / "site", contents())


def test_facts_are_read_from_the_metadata(site: Path) -> None:
    distribution = read(site)
    assert (distribution.name, distribution.version, distribution.problem) == (
        "acme-norms",
        "1.0",
        "",
    )
    assert distribution.requires == ("interposer<2,>=0.1", 'torch>=2.11; python_version >= "3.11"')
    assert (distribution.location, distribution.editable, distribution.standard) == (
        str(site),
        False,
        False,
    )
    assert distribution.altered_files() == []


@pytest.mark.process
def test_one_wheel_has_one_fingerprint_for_every_installation(tmp_path: Path, site: Path) -> None:
    records, prints = set(), {read(site).fingerprint}
    for folder in ("first", "second"):  # pip notes where the wheel was, and writes a script
        wheel = tmp_path / folder / "acme_norms-1.0-py3-none-any.whl"
        wheel.parent.mkdir()
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in contents().items():
                archive.writestr(name, content)
        target = tmp_path / folder / "installed"
        options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
        if folder == "second":
            options.append("--no-compile")
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target)]
        subprocess.run(
            [*command, str(wheel)], check=True, capture_output=True, text=True, timeout=120
        )
        distribution = read(target)
        assert distribution.altered_files() == []
        assert distribution.owns_module("acme.plugin")
        records.add(distribution.record)
        prints.add(distribution.fingerprint)
    assert len(records) == 2
    assert len(prints) == 1


def test_the_fingerprint_does_not_depend_on_the_order_of_record(site: Path) -> None:
    before = read(site)
    path = site / INFO / "RECORD"
    lines = path.read_text().splitlines()
    random.Random(0).shuffle(lines)
    path.write_text("\n".join(lines) + "\n")
    assert read(site).record != before.record
    assert read(site).fingerprint == before.fingerprint


OTHERS = {
    "a file": contents(files={**FILES, "acme/plugin.py": b"raise SystemExit\n"}),
    "one more": contents(files={**FILES, "acme/more.py": b""}),
    "another name": contents(files={**FILES, "acme/tables/c.json": FILES["acme/tables/a, b.json"]}),
    "the metadata": contents(METADATA + "#"),
    "the entry points": contents(scripts=SCRIPTS + "#"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_changed_content_changes_the_fingerprint(
    other: dict[str, bytes], tmp_path: Path, site: Path
) -> None:
    assert read(unpack(tmp_path / "other", other)).fingerprint != read(site).fingerprint


@given(data=st.data())
def test_every_altered_file_is_found(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = unpack(Path(folder), contents())
        distribution = read(site)
        names = [name for name in contents() if not name.endswith("/RECORD")]
        altered = data.draw(st.sets(st.sampled_from(names)))
        for name in altered:
            path = site / name
            content = bytearray(path.read_bytes())
            match data.draw(st.sampled_from(["remove", "grow", "alter", "replace"])):
                case "remove":
                    path.unlink()
                case "alter" if content:
                    place = data.draw(st.integers(0, len(content) - 1))
                    content[place] ^= data.draw(st.integers(1, 255))
                    path.write_bytes(content)
                case "replace":
                    path.unlink()
                    path.mkdir()
                case _:
                    path.write_bytes(bytes([*content, 0]))
        assert sorted(distribution.altered_files()) == sorted(altered)


def test_code_without_a_usable_hash_counts_as_altered(site: Path) -> None:
    digest = base64.urlsafe_b64encode(hashlib.md5(b"").digest()).rstrip(b"=").decode()
    with (site / INFO / "RECORD").open("a") as record:
        record.write("acme/more.py,,\nacme/__pycache__/plugin.cpython-311.pyc,,\n")
        record.write(f"acme/weak.py,md5={digest},0\n/dev/zero,sha256=AAAA,\n")
    (site / "acme" / "weak.py").touch()
    assert read(site).altered_files() == ["acme/more.py", "acme/weak.py", "/dev/zero"]


@pytest.mark.parametrize(
    ("module", "owned"),
    [
        ("acme", True),
        ("acme.plugin", True),
        ("acme.kernels", True),
        ("acme._native", True),
        ("acme.plug", False),
        ("acme.tables", False),
        ("acme.kernels.fast", False),
        ("acm.", False),
        ("", False),
        ("json", False),
        ("acme/plugin", True),
        (".*", False),
    ],
)
def test_modules_are_owned_by_record(module: str, owned: bool, site: Path) -> None:
    assert read(site).owns_module(module) is owned


def editable(tmp_path: Path, layout: str = "src") -> tuple[Path, Path]:
    """Return site and source folder of an editable installation, as its installer leaves them."""
    project = tmp_path / "a project"
    source = project / layout
    unpack(source, FILES)
    url = f'{{"dir_info": {{"editable": true}}, "url": "{project.as_uri()}"}}'
    path = f"{source}\n".encode()
    content_by_path = contents(files={"_acme.pth": path, f"{INFO}/direct_url.json": url.encode()})
    return unpack(tmp_path / "site", content_by_path), source


@pytest.mark.parametrize("layout", ["src", "."])
def test_the_fingerprint_of_an_editable_installation_covers_source_files(
    tmp_path: Path, layout: str
) -> None:
    site, source = editable(tmp_path, layout)
    before = read(site)
    assert before.editable
    assert Path(before.location) == source
    assert (before.altered_files(), before.record) == ([], "")
    assert before.owns_module("whatever")
    assert read(site) == before

    os.utime(source / "acme" / "plugin.py", ns=(1, 1))
    touched = read(site)
    (source / "acme" / "tables" / "new.json").touch()
    grown = read(site)
    (source / "acme" / "kernels" / "__init__.py").unlink()
    shrunk = read(site)
    assert len({distribution.fingerprint for distribution in (before, touched, grown, shrunk)}) == 4


def test_the_fingerprint_of_an_editable_installation_covers_compiled_libraries(
    tmp_path: Path,
) -> None:
    site, _ = editable(tmp_path)
    distribution = []
    for checksum in ("one", "one", "another"):
        record = f"acme/_native.abi3.so,sha256={checksum},9\n"
        (site / INFO / "RECORD").write_text(record, encoding="utf-8")
        distribution.append(read(site).fingerprint)
    assert distribution[0] == distribution[1] != distribution[2]


def test_caches_environments_and_circular_links_are_not_source(tmp_path: Path) -> None:
    site, source = editable(tmp_path)
    before = read(site)
    for folder in (".git", "acme/__pycache__", "environment/lib"):
        (source / folder).mkdir(parents=True)
        (source / folder / "file.py").touch()
    (source / "environment" / "pyvenv.cfg").touch()
    assert read(site).fingerprint == before.fingerprint
    (source / "acme" / "circle").symlink_to(source)
    (source / "acme" / "nowhere.py").symlink_to(source / "missing")
    assert read(site).fingerprint != before.fingerprint


@pytest.mark.parametrize(
    "direct_url",
    [
        "",
        "{",
        "[]",
        "3",
        "[" * 100_000,
        '{"url": 3, "dir_info": {"editable": true}}',
        '{"url": "https://[", "dir_info": {"editable": true}}',
        '{"url": "https://acme.example/x", "dir_info": {"editable": true}}',
        '{"url": "file:///tmp", "dir_info": {}}',
        '{"url": "file:///tmp", "dir_info": {"editable": "yes"}}',
        '{"url": "file:///tmp", "dir_info": null}',
    ],
)
def test_another_origin_is_not_editable(direct_url: str, site: Path) -> None:
    before = read(site)
    (site / INFO / "direct_url.json").write_text(direct_url)
    assert read(site) == before
    assert not before.editable


def test_a_missing_or_huge_editable_folder_is_read_up_to_a_limit(site: Path) -> None:
    for url in ("file:///no/such/folder", "file:///", "file:"):
        text = f'{{"url": "{url}", "dir_info": {{"editable": true}}}}'
        (site / INFO / "direct_url.json").write_text(text)
        assert read(site).editable


def test_without_record_the_fingerprint_covers_installed_files(site: Path) -> None:
    (site / INFO / "RECORD").unlink()
    (site / INFO / "top_level.txt").write_text("acme\nsingle\n/etc\n..\n")
    (site / "single.py").touch()
    before = read(site)
    assert (before.editable, before.record, before.altered_files()) == (False, "", [])
    assert before.owns_module("acme.plugin")
    (site / "other.py").touch()
    assert read(site).fingerprint == before.fingerprint
    prints = {before.fingerprint}
    for name in ("single.py", "acme/plugin.py"):
        (site / name).write_text("changed = True\n")
        prints.add(read(site).fingerprint)
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("header", "replacement", "name", "version", "problem"),
    [
        ("Name: Acme.Norms\n", "", "unknown", "1.0", "the name ''"),
        ("Name: Acme.Norms", "Name: ../acme", "unknown", "1.0", "the name '../acme'"),
        ("Name: Acme.Norms", "Name: ☃", "unknown", "1.0", "the name '☃'"),
        ("Name: Acme.Norms", "Name: interposer-ops", "unknown", "1.0", "installed as 'acme_norms'"),
        ("Version: 1.0", "Name: zeta\nVersion: 1.0", "unknown", "1.0", "'Acme.Norms, zeta'"),
        ("Version: 1.0\n", "", "acme-norms", "0", "the version ''"),
        ("Version: 1.0", "Version: new", "acme-norms", "0", "the version 'new'"),
        ("Version: 1.0", "Version: 01.0", "acme-norms", "1.0", ""),
        (METADATA, "", "unknown", "0", "the name '' and the version ''"),
        (METADATA, "\0\1\2", "unknown", "0", "the name '' and the version ''"),
        (METADATA, ": : :\n  x\n", "unknown", "0", "the name '' and the version ''"),
    ],
)
def test_contradictory_metadata_has_no_identity(
    header: str, replacement: str, name: str, version: str, problem: str, tmp_path: Path
) -> None:
    distribution = read(unpack(tmp_path, contents(METADATA.replace(header, replacement, 1))))
    assert (distribution.name, distribution.version, distribution.standard) == (
        name,
        version,
        False,
    )
    assert problem in distribution.problem
    assert bool(distribution.problem) is bool(problem)


def test_undecodable_metadata_counts_as_missing(site: Path) -> None:
    for name in ("METADATA", "RECORD", "direct_url.json"):
        (site / INFO / name).write_bytes(b"\xff\xfe")
    distribution = read(site)
    assert (distribution.name, distribution.record, distribution.editable) == ("unknown", "", False)


def test_a_record_that_cannot_be_read_is_a_problem(site: Path) -> None:
    (site / INFO / "RECORD").write_text(f"acme/plugin.py,{'x' * 200_000},\n")
    distribution = read(site)
    assert "RECORD cannot be read" in distribution.problem
    assert (distribution.name, distribution.altered_files()) == ("acme-norms", [])


@given(metadata=st.binary(max_size=300), record=st.binary(max_size=300))
def test_no_content_of_metadata_raises(metadata: bytes, record: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        content_by_path = {f"{INFO}/METADATA": metadata, f"{INFO}/RECORD": record}
        distribution = read_distribution(
            importlib_metadata.Distribution.at(str(unpack(Path(folder), content_by_path) / INFO))
        )
        distribution.altered_files()
        distribution.owns_module("acme.plugin")
        assert len(distribution.fingerprint) == 64


def test_every_installed_distribution_can_be_read() -> None:
    for distribution in importlib_metadata.distributions():
        facts = read_distribution(distribution)
        assert facts.problem == ""
        assert facts.name == read_distribution(distribution).name


def test_a_record_without_hashes_is_replaced_by_the_files(tmp_path: Path) -> None:
    metadata = tmp_path / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "RECORD").write_text("acme.py,,\nacme-1.0.dist-info/RECORD,,\n")
    fingerprints = set()
    for source in ("x = 1\n", "x = 'another'\n"):
        (tmp_path / "acme.py").write_text(source)
        distribution = importlib_metadata.PathDistribution(metadata)
        fingerprints.add(read_distribution(distribution).fingerprint)
    assert len(fingerprints) == 2
