"""It is told what code did to the process around it, and put back."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import WAIT_SECONDS

from interposer_sandbox import Host, SideEffects

HOST = Host(environment=lambda: os.environ)


def effects_of(action: Callable[[], object], *, light: bool = True) -> list[str]:
    with SideEffects(HOST, light=light) as side_effects:
        action()
    return side_effects.effects


def test_quiet_code_has_no_effects() -> None:
    assert effects_of(lambda: sum(range(10))) == []
    assert effects_of(lambda: sum(range(10)), light=False) == []


@pytest.mark.parametrize("light", [True, False])
def test_changes_are_reported_and_undone(light: bool, tmp_path: Path) -> None:
    # What a library has of its own for it, unknown to Python, could not be put back.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    originals = (
        Path.cwd(),
        [*sys.path],
        signal.getsignal(signal.SIGTERM),
        builtins.print,
        len(os.environ),
    )
    path = sys.path

    def change() -> None:
        os.environ["ACME_B"] = "1"
        os.environ["ACME_A"] = "1"
        os.chdir("/")
        sys.path = ["/acme"]
        sys.modules["json"] = sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        builtins.print = len  # type: ignore[assignment]
        builtins.acme = 1  # type: ignore[attr-defined]

    assert effects_of(change, light=light) == [
        "replaces builtins.print",
        "adds builtins.acme",
        "changes the environment: ACME_A, ACME_B",
        "replaces the module 'json'",
        "changes sys.path",
        "changes the working directory",
        "installs a handler for SIGTERM",
    ]
    assert originals == (
        *(Path.cwd(), [*sys.path], signal.getsignal(signal.SIGTERM)),
        *(builtins.print, len(os.environ)),
    )
    assert sys.path is path
    assert sys.modules["json"] is json
    assert not hasattr(builtins, "acme")


@pytest.mark.parametrize(
    ("get", "put", "other", "setting"),
    [
        pytest.param(
            *(torch.get_num_threads, torch.set_num_threads, 97, "number of threads"),
            marks=pytest.mark.process,  # ``SideEffects`` sleeps while it waits for threads
        ),
        (torch.get_default_dtype, torch.set_default_dtype, torch.float64, "default dtype"),
        (torch.is_grad_enabled, torch._C._set_grad_enabled, False, "gradient mode"),
        (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            "medium",
            "float32 precision",
        ),
    ],
)
def test_settings_of_torch_are_restored(
    get: Callable[[], object], put: Callable[[object], object], other: object, setting: str
) -> None:
    before = get()
    assert effects_of(lambda: put(other), light=False) == [f"changes torch's {setting}"]
    assert get() == before


def test_the_beginning_of_the_output_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("hello")
        print("x" * 1000, file=sys.stderr)

    (effect,) = effects_of(speak)
    assert effect.startswith("prints 'hello\\nxxx")
    assert len(effect) < 220
    assert capsys.readouterr() == ("", "")
    assert effects_of(lambda: print("heard"), light=False) == []
    assert capsys.readouterr().out == "heard\n"


def test_output_of_other_threads_passes() -> None:
    heard = io.StringIO()
    start, finished = threading.Event(), threading.Event()

    def speak() -> None:
        start.wait()
        print("mine")
        finished.set()

    thread = threading.Thread(target=speak)
    thread.start()

    def let_it_speak() -> None:
        start.set()
        finished.wait()

    with contextlib.redirect_stdout(heard):
        assert effects_of(let_it_speak) == []
    thread.join()
    assert heard.getvalue() == "mine\n"


def test_changes_of_other_threads_are_neither_reported_nor_undone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACME_APP", "0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    precision = torch.get_float32_matmul_precision()
    start, finished = threading.Event(), threading.Event()

    def work() -> None:
        start.wait(WAIT_SECONDS)
        os.environ["ACME_APP"] = "1"
        sys.path.append("/acme")
        os.chdir("/")
        torch.set_float32_matmul_precision("medium")
        finished.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with SideEffects(HOST, alone=False, package="acme") as side_effects:
            start.set()
            assert finished.wait(WAIT_SECONDS)
        assert side_effects.effects == []
        assert (os.environ["ACME_APP"], sys.path[-1], Path.cwd()) == ("1", "/acme", Path("/"))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        thread.join()
        torch.set_float32_matmul_precision(precision)


def test_blocks_of_several_threads_may_overlap() -> None:
    ours = (sys.stdout, sys.stderr)
    first, second = threading.Event(), threading.Event()
    effects = []

    def overlapped() -> None:
        with SideEffects(HOST, alone=False) as side_effects:
            first.set()
            assert second.wait(WAIT_SECONDS)
        effects.extend(side_effects.effects)

    thread = threading.Thread(target=overlapped)
    thread.start()
    assert first.wait(WAIT_SECONDS)
    with SideEffects(HOST, alone=False) as side_effects:  # begins and ends after the other
        second.set()
        thread.join()
    assert effects == side_effects.effects == []
    assert (sys.stdout, sys.stderr) == ours


def test_a_captured_stream_that_code_keeps_works_afterwards() -> None:
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        with SideEffects(HOST) as side_effects:
            handler = logging.StreamHandler(sys.stderr)
        handler.emit(logging.makeLogRecord({"msg": "later"}))
    assert side_effects.effects == []
    assert heard.getvalue() == "later\n"


@pytest.mark.process  # as above
def test_a_thread_is_reported_unless_it_ended() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="mine")
    assert effects_of(thread.start) == ["leaves the thread 'mine' running"]
    stop.set()
    thread.join()

    def run_and_join() -> None:
        short = threading.Thread(target=int)
        short.start()
        short.join()

    assert effects_of(run_and_join) == []
    event = threading.Event()
    library = threading.Thread(target=event.wait)
    assert effects_of(library.start, light=False) == []
    event.set()
    library.join()


def test_an_exception_passes_and_effects_are_still_listed() -> None:
    side_effects = SideEffects(HOST)

    def change_and_raise() -> None:
        with side_effects:
            os.environ["ACME"] = "1"
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        change_and_raise()
    assert side_effects.effects == ["changes the environment: ACME"]
    assert "ACME" not in os.environ


def test_a_new_module_may_replace_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "acme_lazy.py").write_text(
        "import sys\n\nclass Lazy:\n    pass\n\nsys.modules[__name__] = Lazy()\n"
    )
    assert effects_of(lambda: __import__("acme_lazy")) == []
    del sys.modules["acme_lazy"]


NAMES = st.sampled_from(["GUARD_A", "GUARD_B", "GUARD_C"])


@given(
    st.dictionaries(NAMES, st.sampled_from(["", "1", "2"])),
    st.lists(st.tuples(NAMES, st.sampled_from([None, "", "1", "2"]))),
)
def test_variables_are_restored_and_changed_ones_named(
    before: dict[str, str], changes: list[tuple[str, str | None]]
) -> None:
    variables, after = {"OTHER": "1", **before}, dict[str, str | None]()
    with SideEffects(Host(lambda: variables)) as side_effects:
        for name, change in changes:
            after[name] = change
            if change is None:
                variables.pop(name, None)
            else:
                variables[name] = change
    changed = sorted(name for name, value in after.items() if value != before.get(name))
    expected = [f"changes the environment: {', '.join(changed)}"] if changed else []
    assert side_effects.effects == expected
    assert variables == {"OTHER": "1", **before}


def test_a_host_without_variables_lets_them_change(monkeypatch: pytest.MonkeyPatch) -> None:
    with SideEffects(Host()) as side_effects:
        monkeypatch.setenv("ACME", "1")
    assert side_effects.effects == []
    assert os.environ["ACME"] == "1"
