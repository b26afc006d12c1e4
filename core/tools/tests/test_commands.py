"""``doctor``, ``explain`` and ``lock``, through the command's own entry point."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.forks import forks

from interposer import (
    Capability,
    Case,
    Config,
    Device,
    Kernel,
    OpEntry,
    Platform,
    PlatformEntry,
    Requires,
    Verdict,
    custom_op,
    place,
    register,
    use,
)
from interposer.errors import ConfigError
from interposer.tooling import Store
from interposer_testing.described import DeviceDescription
from interposer_tools._cli import main
from interposer_tools.options import policy

Command = Callable[..., tuple[int, str, str]]


class Abacus(Platform):
    name = "abacus"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Verdict:
        return Verdict.accept()

    def devices(self) -> Sequence[Device]:
        return [Device("abacus", "cpu", "Abacus 9", self.capability("cpu"))]

    def capability(self, device: str) -> Capability:
        return Capability("beads", frozenset({"slide"}), frozenset({"float32"}), 13, 1 << 20)

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        return [torch.float32]


class Broken(Abacus):
    name = "broken"

    @classmethod
    def probe(cls) -> Verdict:
        raise OSError("the beads are gone")


def negate_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    yield Case("ones", {"x": torch.ones(2).to(dtype)})


@custom_op("negate", cases=negate_cases)
def negate(x: torch.Tensor) -> torch.Tensor:
    return -x


RECORDS = (
    PlatformEntry("abacus", f"{__name__}:Abacus"),
    OpEntry("negate", f"{__name__}:negate"),
    Kernel(
        "negate",
        "negate_slide",
        f"{__name__}:negate",
        "abacus",
        Requires(features=frozenset({"slide"})),
    ),
)


@pytest.fixture(autouse=True)
def _abacus(make_plugin: Callable[..., ModuleType], tmp_path: Path) -> Iterator[None]:
    with (
        register(make_plugin("acme", *RECORDS)),
        use(plugins="none", isolation="off", cache_dir=str(tmp_path / "cache")),
    ):
        yield


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs the command and returns its exit code, output and errors."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command sets its own

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["interposer", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def facts(command: Command, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    ended, out, err = command(*arguments, "--json")
    assert (ended, err) == (code, "")
    return json.loads(out)  # type: ignore[no-any-return]


def test_doctor_exits_with_0_for_a_healthy_installation(command: Command) -> None:
    report = facts(command, "doctor")
    assert report["healthy"]
    assert report["device"]["name"] == "Abacus 9"
    code, out, err = command("doctor")
    assert (code, err) == (0, "")
    assert out.endswith("Nothing failed.\n")


def test_doctor_exits_with_1_if_anything_failed(
    command: Command, make_plugin: Callable[..., ModuleType]
) -> None:
    broken = PlatformEntry("broken", f"{__name__}:Broken", score=0.0)
    with register(make_plugin("worn", broken)):
        report = facts(command, "doctor", code=1)
        code, out, err = command("doctor")
    assert [problem["subject"] for problem in report["problems"]] == [
        "platform 'broken' of worn in code"
    ]
    assert (code, err) == (1, "")
    assert "FAILED platform 'broken' of worn in code" in out


def test_doctor_fresh_forgets_the_verdicts(command: Command, tmp_path: Path) -> None:
    Store(tmp_path / "cache").write("verdicts", {"a": 1}, True)
    assert facts(command, "doctor")["cache"]["entries"] == {"verdicts": 1}
    assert facts(command, "doctor", "--fresh")["cache"]["entries"] == {}


def test_explain_reads_the_description_of_doctor(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    assert command("doctor", "--describe", file) == (0, f"{file}: Abacus 9\n", "")
    assert DeviceDescription.read(file) == DeviceDescription.of(place())
    assert command("doctor", "--describe", "-") == (0, file.read_text(), "")
    real, described = facts(command, "explain"), facts(command, "explain", "--on", file)
    assert described["device"] == real["device"]
    assert described["candidates"] == real["candidates"]
    assert described["notes"] == [f"'Abacus 9' is described in {file}"]


def test_a_description_that_cannot_be_written_is_one_message(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = command("doctor", "--describe", tmp_path / "file" / "here.json")
    assert (code, out) == (1, "")
    assert "cannot be written" in err


def test_a_changed_description_changes_the_choices(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "there.json"
    command("doctor", "--describe", file)
    file.write_text(file.read_text().replace('"slide"', '"carry"'))

    def slides(*arguments: str | Path) -> dict[str, Any]:
        (subject,) = facts(command, "explain", "--why", "negate", *arguments)["candidates"]
        (option,) = (o for o in subject["options"] if o["candidate"] == "negate_slide")
        return option  # type: ignore[no-any-return]

    assert slides()["accepted"]
    described = slides("--on", file)
    assert not described["accepted"]
    assert described["reason"] == "needs slide, which the device lacks"
    assert described["requires"] == ["platform abacus", "features slide"]


def test_explain_without_a_model_lists_platform_policy_and_candidates(command: Command) -> None:
    report = facts(command, "explain", "--kernel", "negate=reference")
    (platform,) = report["choices"]
    assert (platform["kind"], platform["chosen"]) == ("platform", "abacus")
    settings = {s["setting"]: (s["value"], s["source"]) for s in report["policy"]}
    assert settings["kernels.negate"] == ("reference", "argument")
    assert settings["isolation"] == ("off", "use()")
    assert ("kernel", "negate") in [(c["kind"], c["name"]) for c in report["candidates"]]
    code, out, _ = command("explain")
    assert code == 0
    assert "kernel 'negate': negate_slide (acme in code), score 10; 2 of 2 candidates fit" in out
    code, out, _ = command("explain", "--all")
    assert code == 0
    assert "kernel 'negate'\n  negate_slide (acme in code): score 10 on abacus, fits" in out
    assert "\nplatform\n  -> abacus (acme in code): " in out  # it is for all places


def test_why_selects_one_subject_and_refuses_unknown_ones(command: Command) -> None:
    code, out, _ = command("explain", "--why", "negate")
    assert code == 0
    assert f"      target: {__name__}:negate\n" in out
    assert "rms_norm" not in out
    code, out, err = command("explain", "--why", "nagate")
    assert (code, out) == (2, "")
    assert "nearest first: 'negate'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--on", "abaccus"), "Unknown device 'abaccus'"),
        (("--on", "x", "--platform", "abacus"), "--on and --platform both choose the device"),
        (("--platform", "abaccus"), "nearest first: 'abacus'"),
        (("--kernel", "negate"), "not of the form NAME=CHOICE"),
        (("--kernel", "=negate_slide"), "not of the form NAME=CHOICE"),
        (("--kernel", "negate=+"), "not of the form NAME=CHOICE"),
        (("--kernel", "negate=a", "--kernel", "negate=b"), "to 'a' and to 'b'"),
        (("--kernel", "nagate=reference"), "Unknown op 'nagate' in Config.kernels"),
        (("--why", "negate_slide"), "is a candidate for 'negate'. Try: --why negate"),
        (("--platform", "abacus,other"), "--platform: 'platform' is set to 'abacus' and to"),
        (("--platform", ""), "--platform: 'platform=' is not of the form"),
    ],
)
def test_a_bad_option_is_a_usage_error_with_one_message(
    command: Command, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = command("explain", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--on", "none.json"), "none.json: cannot be read"),
        (("--locked",), "interposer.lock does not exist"),
        (("of-nowhere",), "of-nowhere"),
        (("--platform", "-abacus"), "forb"),
    ],
)
def test_a_failure_is_one_message(
    command: Command, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = command("explain", *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_a_wrong_option_is_a_usage_error(command: Command) -> None:
    for arguments in (("explain", "--wyh", "x"), ("doctor", "--describe"), ("lock", "extra")):
        code, out, _ = command(*arguments)
        assert (code, out) == (2, "")


def test_options_set_only_their_own_fields() -> None:
    assert policy().model_fields_set == set()
    assert policy(locked=True) == Config(locked=True)
    assert policy(platform="+cpu, -abacus") == Config(
        platform={"prefer": ["cpu"], "forbid": ["abacus"]}
    )
    kernels = ["a=x", "b=+y", "b=+z", "b=-w", "a@layers.*=x"]
    assert policy(kernels, "cpu") == Config(
        platform="cpu",
        kernels={"a": "x", "b": {"prefer": ["y", "z"], "forbid": ["w"]}, "a@layers.*": "x"},
    )
    with pytest.raises(ConfigError, match="leaves nothing to prefer"):
        policy(["a=x", "a=+y"])


def test_locked_enforces_the_written_lock(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "interposer.lock"
    code, _, err = command("lock", "--check")
    assert code == 1
    assert "does not exist" in err
    code, out, err = command("lock")
    assert (code, err) == (0, "")
    assert out.startswith(f"{file}: ")
    assert out.endswith("distributions are locked\n")
    assert command("lock", "--check")[0] == 0
    text = file.read_text()
    locked = json.loads(text)["distributions"]
    file.write_text(text.replace(locked[0]["name"], "acme-unheard-of"))
    for arguments in (("lock", "--check"), ("explain", "--locked")):
        code, out, err = command(*arguments)
        assert (code, out) == (1, "")
        assert "content and checksum differ" in err
    assert facts(command, "doctor", "--locked", code=1)["problems"][0]["subject"] == "lock"
    file.write_text(text)
    assert command("explain", "--locked", "--why", "negate")[0] == 0
    assert facts(command, "doctor", "--locked")["lock"] == f"{file}: as locked"


def on_terminal(columns: int, *arguments: str, plugins: str = "none") -> str:
    """Return the output of the command on a terminal with ``columns`` columns."""
    ours, theirs = os.openpty()
    command = forks().command("-m", "interposer_tools", *arguments)
    environment = {**os.environ, "INTERPOSER_PLUGINS": plugins, "TERM": "xterm"}
    environment["COLUMNS"] = str(columns)
    with subprocess.Popen(command, stdout=theirs, env=environment) as process:
        os.close(theirs)
        printed = b""
        with contextlib.suppress(OSError):  # Linux ends a terminal that nobody holds with EIO
            while chunk := os.read(ours, 4096):
                printed += chunk
    os.close(ours)
    assert process.returncode in (0, 1)  # without a platform it has something to say
    return printed.decode()


@pytest.mark.slow
@pytest.mark.process
def test_a_wide_terminal_gets_tables() -> None:
    printed = on_terminal(150, "doctor")
    assert "plugins" in printed
    assert "━━━" in printed


@pytest.mark.slow
@pytest.mark.process
def test_a_narrow_terminal_gets_plain_text() -> None:
    printed = on_terminal(119, "doctor")
    assert "\nplugins:\r\n" in printed
    assert "━" not in printed


@pytest.mark.process
def test_full_explanations_are_plain_text_on_any_terminal() -> None:
    printed = on_terminal(150, "explain", "--why", "platform", plugins="interposer-cpu")
    assert "\nplatform\r\n  -> cpu (interposer-cpu " in printed
    assert "━" not in printed
