"""Where the files of a configuration are looked for, and which ones are left alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interposer._config.sources import read_project_file, read_user_file
from interposer.errors import ConfigError

TABLE = "[tool.interposer]\nplatform = 'cpu'\n"
OF_OTHERS = "[tool.others]\nplatform = 'cpu'\n"


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Return three nested folders, the innermost first; nothing above them is looked at."""
    (tmp_path / ".git").mkdir()
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    return [inner, inner.parent, tmp_path]


@given(
    st.lists(
        st.sampled_from(["interposer.toml", "pyproject.toml", "others", "none"]),
        min_size=3,
        max_size=3,
    ),
    st.sampled_from([None, 0, 1]),
)
def test_the_nearest_file_up_to_the_repository_is_read(
    tmp_path_factory: pytest.TempPathFactory, files: list[str], repository: int | None
) -> None:
    top = tmp_path_factory.mktemp("top")
    (top / ".git").mkdir()
    nested = [top / "a" / "b", top / "a", top]
    nested[0].mkdir(parents=True)
    if repository is not None:
        (nested[repository] / ".git").write_text("gitdir: elsewhere")  # as in a worktree
    expected = None
    for depth, (folder, file) in enumerate(zip(nested, files, strict=True)):
        if file == "others":
            (folder / "pyproject.toml").write_text(OF_OTHERS)
        elif file != "none":
            text = TABLE if file == "pyproject.toml" else "platform = 'cpu'"
            (folder / file).write_text(text)
            if expected is None and (repository is None or depth <= repository):
                expected = folder / file
    project_file = read_project_file(nested[0])
    assert (project_file and project_file.path) == expected
    assert project_file is None or project_file.fields == {"platform": "cpu"}


def test_both_in_one_folder_raise(folders: list[Path]) -> None:
    (folders[1] / "interposer.toml").write_text("")
    (folders[1] / "pyproject.toml").write_text(TABLE)
    with pytest.raises(ConfigError, match=r"has interposer.toml and also .* Try: keep one of them"):
        read_project_file(folders[0])


def test_an_empty_file_counts(folders: list[Path]) -> None:
    (folders[0] / "interposer.toml").write_text("")
    (folders[1] / "interposer.toml").write_text("platform = 'cpu'")
    file = read_project_file(folders[0])
    assert file == (folders[0] / "interposer.toml", {})


def test_a_broken_file_of_other_tools_is_ignored(folders: list[Path]) -> None:
    (folders[0] / "pyproject.toml").write_text("[tool.others\n")
    assert read_project_file(folders[0]) is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("interposer.toml", b"platform = ", "cannot be read: Invalid value"),
        ("interposer.toml", b"\xff", "cannot be read: 'utf-8' codec"),
        ("pyproject.toml", b"[tool.interposer\n", "cannot be read: "),
        ("pyproject.toml", b"[tool]\ninterposer = 3", "tool.interposer is 3, must be a table"),
    ],
)
def test_an_invalid_file_raises(folders: list[Path], name: str, text: bytes, message: str) -> None:
    (folders[1] / name).write_bytes(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_project_file(folders[0])
    assert str(folders[1] / name) in str(caught.value)


def test_a_folder_in_the_place_of_the_file_raises(folders: list[Path]) -> None:
    (folders[0] / "interposer.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_project_file(folders[0])


@pytest.mark.skipif(sys.platform == "win32", reason="another variable names the folder there")
def test_the_file_of_the_user_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_user_file() is None
    (tmp_path / "interposer").mkdir()
    (tmp_path / "interposer" / "config.toml").write_text("strict = true")
    assert read_user_file() == (tmp_path / "interposer" / "config.toml", {"strict": True})


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything"
)
def test_a_user_file_that_cannot_be_read_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "interposer").mkdir()
    (tmp_path / "interposer" / "config.toml").touch(mode=0o000)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_user_file()
