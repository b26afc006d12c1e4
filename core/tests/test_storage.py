"""What is stored is read back whole or not at all, whoever writes at the same time."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import WAIT_SECONDS, wait_until

import interposer._config.storage
from interposer import Config
from interposer._config.storage import JSON, Store, checksum, default_store, write_text
from interposer.errors import StorageError
from interposer.tooling import SharedCacheWarning

texts = st.text(st.characters(), max_size=8)  # unpaired surrogates too
atoms = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
values: st.SearchStrategy[JSON] = st.recursive(
    atoms.filter(lambda atom: atom not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
keys = st.dictionaries(texts, values, max_size=4)

# Writes 20 entries of its own and one that all writers share, and reads them back meanwhile.
WRITER = """
import sys
from pathlib import Path
from interposer._config.storage import Store

store, name = Store(Path(sys.argv[1])), sys.argv[2]
for number in range(20):
    store.write("figures", {"writer": name, "number": number}, [name, number])
    store.write("figures", {"shared": True}, [name, number] * 500)
    shared = store.read("figures", {"shared": True})
    assert shared == shared[:2] * 500, shared
    assert [entry.problem for entry in store.entries("figures") if entry.problem] == []
"""
ENDLESS = """
import itertools, sys
from pathlib import Path
from interposer._config.storage import Store

store = Store(Path(sys.argv[1]))
for number in itertools.count():
    store.write("figures", {"shared": True}, [number] * 5000)
"""
LIGHT = """
import sys
import interposer._config.storage, interposer._validation.distribution
import interposer._validation.compatibility, interposer._plugins.trust
print(sorted({"torch", "typer", "rich"} & {name.partition(".")[0] for name in sys.modules}))
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture(scope="module")
def scratch() -> Iterator[Store]:
    """Yield one store for all examples of a property."""
    with tempfile.TemporaryDirectory() as folder:
        yield Store(Path(folder))


def only_file(store: Store) -> Path:
    (entry,) = store.entries("figures")
    return entry.path


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(a: JSON, b: JSON) -> bool:
    """Compare types as well: 1, 1.0 and True are three values."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


@given(key=keys, value=values)
def test_a_written_value_is_read(scratch: Store, key: dict[str, JSON], value: JSON) -> None:
    scratch.write("figures", key, value)
    assert same(scratch.read("figures", key), value)
    assert same(Store(scratch.folder).read("figures", dict(reversed(key.items()))), value)


@given(key=keys, other=keys)
def test_an_entry_is_found_only_by_its_key(key: dict[str, JSON], other: dict[str, JSON]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        store.write("figures", key, "mine")
        assert store.read("figures", other) == ("mine" if same(key, other) else None)
        assert store.read("verdicts", key) is None


@pytest.mark.parametrize("number", [1, 1.0, True])
def test_numbers_of_three_types_are_three_keys(store: Store, number: JSON) -> None:
    for key_value in (1, 1.0, True):
        store.write("figures", {"number": key_value}, type(key_value).__name__)
    assert store.read("figures", {"number": number}) == type(number).__name__


KEY: dict[str, JSON] = {"device": "cpu", "tokens": 16}
VALUE: JSON = {"seconds": [0.5, 1e-7, 3], "note": 'é "\\', "fine": True, "none": None}


@given(data=st.data())
def test_any_altered_byte_is_noticed(scratch: Store, data: st.DataObject) -> None:
    scratch.clear()
    scratch.write("figures", KEY, VALUE)
    path = only_file(scratch)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["alter", "cut", "insert", "remove"])):
        case "alter":
            content[place] = data.draw(st.integers(0, 255))
        case "cut":
            del content[place:]
        case "insert":
            content.insert(place, data.draw(st.integers(0, 255)))
        case "remove":
            del content[place]
    path.write_bytes(content)
    (entry,) = scratch.entries("figures")
    assert entry.path == path
    if not entry.problem:
        assert same(scratch.read("figures", KEY), VALUE)
        return
    with pytest.raises(StorageError) as caught:
        scratch.read("figures", KEY)
    assert (caught.value.path, caught.value.reason) == (str(path), entry.problem)


@given(content=st.binary(max_size=200) | values.map(lambda value: json.dumps(value).encode()))
def test_foreign_content_is_refused(scratch: Store, content: bytes) -> None:
    scratch.clear()
    scratch.write("figures", KEY, VALUE)
    only_file(scratch).write_bytes(content)
    with pytest.raises(StorageError, match="is corrupt"):
        scratch.read("figures", KEY)


def test_an_entry_with_a_fitting_checksum_for_another_value_is_refused(store: Store) -> None:
    store.write("figures", KEY, 1)
    path = only_file(store)
    fields = json.loads(path.read_text())
    forged = {**fields, "value": 2, "checksum": checksum([KEY, 2]), "version": 2}
    path.write_text(json.dumps(forged, sort_keys=True, separators=(",", ":")))
    with pytest.raises(StorageError, match="is corrupt"):
        store.read("figures", KEY)


def test_an_entry_under_the_name_of_another_is_refused(store: Store) -> None:
    store.write("figures", KEY, 1)
    path = only_file(store)
    store.write("figures", {"device": "other"}, 2)
    (other_path,) = {entry.path for entry in store.entries("figures")} - {path}
    path.write_bytes(other_path.read_bytes())
    with pytest.raises(StorageError, match="another key"):
        store.read("figures", KEY)


def test_a_refused_entry_is_replaced_by_writing(store: Store) -> None:
    store.write("figures", KEY, 1)
    only_file(store).write_bytes(b"")
    store.write("figures", KEY, 2)
    assert store.read("figures", KEY) == 2


@pytest.mark.parametrize("depth", [5_000, 200_000])
def test_too_deep_nesting_is_refused(store: Store, depth: int) -> None:
    store.write("figures", KEY, 1)
    only_file(store).write_text("[" * depth)
    with pytest.raises(StorageError, match="is corrupt"):
        store.read("figures", KEY)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}, b"bytes"])
def test_a_value_that_is_not_json_is_not_written(store: Store, value: JSON) -> None:
    with pytest.raises(StorageError, match="is not JSON"):
        store.write("figures", KEY, value)
    with pytest.raises(StorageError, match="is not JSON"):
        store.write("figures", {"key": value}, 1)
    assert not store.folder.exists()


@pytest.mark.parametrize("kind", ["", "..", "a/b", "Figures", "/etc", "figures\n"])
def test_a_kind_must_be_a_word(store: Store, kind: str) -> None:
    with pytest.raises(ValueError, match="is no kind of entries"):
        store.write(kind, KEY, 1)


def test_reading_touches_nothing(store: Store) -> None:
    assert store.read("figures", KEY) is None
    assert list(store.entries("figures")) == []
    assert (store.kinds(), store.clear(), store.clear("figures")) == ([], 0, 0)
    assert not store.folder.exists()


def test_kinds_are_stored_and_cleared_separately(store: Store) -> None:
    for kind in ("figures", "verdicts"):
        for number in range(3):
            store.write(kind, {"number": number}, kind)
    assert store.kinds() == ["figures", "verdicts"]
    assert store.clear("figures") == 3
    assert store.kinds() == ["verdicts"]
    assert [entry.value for entry in store.entries("verdicts")] == ["verdicts"] * 3
    assert (store.clear(), store.kinds()) == (3, [])


def test_clearing_does_not_touch_other_files(store: Store) -> None:
    store.write("figures", KEY, 1)
    mine = store.folder / "notes" / "diary.json"
    beside = store.folder / "figures" / "diary.json"
    for file in (mine, beside):
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
    assert store.kinds() == ["figures"]
    assert store.clear() == 1
    assert (mine.read_text(), beside.read_text()) == ("{}", "{}")


def test_a_file_in_place_of_the_folder_raises(store: Store) -> None:
    store.folder.write_text("in the way")
    with pytest.raises(StorageError, match="cannot be read"):
        store.read("figures", KEY)
    with pytest.raises(StorageError, match="cannot be written"):
        store.write("figures", KEY, 1)
    assert [bool(entry.problem) for entry in store.entries("figures")] == [True]
    assert store.kinds() == []
    assert store.folder.read_text() == "in the way"


def test_a_folder_in_place_of_an_entry_raises(store: Store) -> None:
    store.write("figures", KEY, 1)
    path = only_file(store)
    path.unlink()
    path.mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        store.read("figures", KEY)
    with pytest.raises(StorageError, match="cannot be written"):
        store.write("figures", KEY, 1)
    with pytest.raises(StorageError, match="cannot be cleared"):
        store.clear()
    assert listed(path.parent) == [path.name], "a temporary file is left"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs the files of Unix")
@pytest.mark.parametrize("kind", ["a symbolic link", "a FIFO"])
def test_planted_files_and_links_are_refused(store: Store, kind: str) -> None:
    store.write("figures", KEY, 1)
    path = only_file(store)
    victim = store.folder / "victim"
    path.replace(victim)
    path.symlink_to(victim) if kind == "a symbolic link" else os.mkfifo(path)
    with pytest.raises(StorageError, match=f"cannot be read: .* is {kind}"):
        store.read("figures", KEY)
    content = victim.read_bytes()
    store.write("figures", KEY, 2)
    assert store.read("figures", KEY) == 2
    assert victim.read_bytes() == content


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can chown")
def test_an_entry_of_another_user_is_refused(store: Store, tmp_path: Path) -> None:
    store.write("figures", KEY, 1)
    path = only_file(store)
    os.chown(path, 54321, 54321)
    with pytest.raises(StorageError, match="belongs to user 54321, not to this one or root"):
        store.read("figures", KEY)
    folder = path.parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    os.lchown(folder, 54321, 54321)
    for attempt in (lambda: store.write("figures", KEY, 2), lambda: store.clear("figures")):
        with pytest.raises(StorageError, match=f"{folder} is a symbolic link of user 54321"):
            attempt()
    assert listed(tmp_path / "elsewhere") == [path.name]


@pytest.mark.skipif(sys.platform == "win32", reason="needs the permissions of Unix")
def test_a_world_writable_cache_is_warned_of_once(store: Store) -> None:
    store.write("figures", KEY, 1)
    (store.folder / "figures").chmod(0o777)
    with pytest.warns(SharedCacheWarning, match=f"can write to {store.folder / 'figures'}"):
        store.write("figures", KEY, 1)
    store.write("figures", KEY, 2)


def test_the_secret_of_a_cache_is_private_and_lasts(store: Store) -> None:
    secret = store.secret()
    assert secret is not None
    assert len(secret) == 32
    assert Store(store.folder).secret() == secret
    assert listed(store.folder) == ["secret"]
    if sys.platform != "win32":
        assert (store.folder / "secret").stat().st_mode & 0o777 == 0o600
    assert store.kinds() == []


def test_a_folder_with_an_invalid_name_raises() -> None:
    store = Store(Path("null\0character"))
    with pytest.raises(StorageError, match="cannot be read"):
        store.read("figures", KEY)
    with pytest.raises(StorageError, match="cannot be written"):
        store.write("figures", KEY, 1)


@pytest.mark.process
def test_concurrent_writers_lose_nothing(store: Store) -> None:
    command = [sys.executable, "-c", WRITER, str(store.folder)]
    names = ["a", "b", "c", "d"]
    writers = [
        subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in names
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=WAIT_SECONDS)
        assert writer.returncode == 0, errors
    for name in names:
        for number in range(20):
            key: dict[str, JSON] = {"writer": name, "number": number}
            assert store.read("figures", key) == [name, number]
    shared = store.read("figures", {"shared": True})
    assert isinstance(shared, list)
    assert shared[0] in names
    assert shared == [shared[0], 19] * 500
    assert len(listed(store.folder / "figures")) == 4 * 20 + 1


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_writer_leaves_a_complete_entry(store: Store) -> None:
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", ENDLESS, str(store.folder)])
        try:
            wait_until(lambda: store.read("figures", {"shared": True}), "the first entry")
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        value = store.read("figures", {"shared": True})
        assert isinstance(value, list)
        assert value == value[:1] * 5000
        assert store.clear() == 1
        assert listed(store.folder / "figures") == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs a umask")
def test_files_follow_the_umask_so_that_users_can_share_a_store(store: Store) -> None:
    before = os.umask(0o022)
    try:
        store.write("figures", KEY, 1)
    finally:
        os.umask(before)
    assert only_file(store).stat().st_mode & 0o777 == 0o644


def test_a_failed_write_leaves_the_old_text(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_text(path, "old")
    with pytest.raises(StorageError, match="cannot be written"):
        write_text(path, "an unpaired surrogate: \ud800")
    assert path.read_text() == "old"
    assert listed(tmp_path) == ["table.json"]


def test_the_store_is_where_the_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_store(Config(cache_dir=str(tmp_path))) == Store(tmp_path)
    assert default_store(Config(cache_dir="~/x")) == Store(Path.home() / "x")
    users = platformdirs.user_cache_path("interposer", appauthor=False)
    assert default_store(Config()) == Store(users)
    monkeypatch.setenv("INTERPOSER_CACHE_DIR", str(tmp_path / "variable"))
    Config.refresh()
    assert default_store() == Store(tmp_path / "variable")


@pytest.mark.process
def test_light_modules_import_no_torch() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "[]"


def test_nothing_in_the_core_unpickles() -> None:
    loaders = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
    package = Path(interposer._config.storage.__file__).parent
    imports = []
    for module in package.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names):
                    imports += [(module, n.name) for n in names if n.name in loaders]
                case ast.ImportFrom(module=str(name)) if name in loaders:
                    imports.append((module, name))
                case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                    imports.append((module, "torch.load"))
    assert imports == []


HOMELESS = """
import os, sys, warnings
from interposer import Config
from interposer._config.sources import read_project_file, read_user_file
from interposer._config.storage import default_store
from pathlib import Path

warnings.simplefilter("always")
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(54321)
    os.setuid(54321)
print(read_user_file())
store = default_store(Config(cache_dir=sys.argv[1] or None))
default_store(Config(cache_dir=sys.argv[1] or None))
try:
    store.write("figures", {}, 1)
    print(store.read("figures", {}), oct(store.folder.stat().st_mode & 0o777))
except Exception as error:
    print(type(error).__name__)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """Yield a folder that every user may write to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def homeless(shared: Path, home: str | None = None, cache_dir: str = "") -> tuple[str, str]:
    names = ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "INTERPOSER_CACHE_DIR")
    environment = {name: text for name, text in os.environ.items() if name not in names}
    environment |= {"TMPDIR": str(shared)} | ({"HOME": home} if home else {})
    command = [sys.executable, "-c", HOMELESS, cache_dir]
    completed = subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, check=False
    )
    return completed.stdout, completed.stderr


@pytest.mark.landing(1)
@pytest.mark.process
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may become someone else"
)
@pytest.mark.parametrize("cache_dir", ["", "~/cache"])
def test_a_user_without_a_home_is_served(shared: Path, cache_dir: str) -> None:
    printed, warned = homeless(shared, cache_dir=cache_dir)
    assert printed == "None\n1 0o700\n", warned
    assert warned.count("StorageWarning") == 1
    assert listed(shared) == ["interposer-54321"]
    # A folder that someone else may have prepared is not used.
    (shared / "interposer-54321").chmod(0o777)
    assert homeless(shared)[0] == "None\nStorageError\n"
    (shared / "interposer-54321").rename(shared / "other")
    (shared / "interposer-54321").symlink_to(shared / "other")
    assert homeless(shared)[0] == "None\nStorageError\n"


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs the permissions of Unix")
def test_a_home_that_cannot_be_searched_is_not_fatal(shared: Path) -> None:
    home = shared / "home"
    (home / ".config" / "interposer").mkdir(parents=True)
    home.chmod(0o000)
    try:
        printed, warned = homeless(shared, str(home))
    finally:
        home.chmod(0o700)
    assert (printed, warned) == ("None\nStorageError\n", "")
