"""Kernels are tried in the layers of an engine that an entry point announces."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from interposer.errors import ConfigError, UnknownNameError
from interposer_testing import Report, verify

pytestmark = pytest.mark.process

SOUND = """
from interposer import Resolver, Site, place
from interposer_ops.activations import silu_and_mul
from interposer_testing import Host

class Acme(Host):
    version = "acme 2.1"

    def layers(self, op):
        return ("Gate", "OtherGate") if op == "silu_and_mul" else ()

    def compute(self, layer, op, arguments):
        x = arguments["x"]
        site = Site(Resolver.at(place()), "layer", x.dtype)
        return site.bind(silu_and_mul, intermediate_size=x.shape[-1] // 2)(x)
"""
FAULTY = SOUND.replace("// 2)(x)", "// 2)(x if layer == 'Gate' else -x)")


@pytest.fixture
def announce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Install a distribution with a host; the text of its module is written by each test."""
    info = tmp_path / "acme_host-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-host\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text("[interposer.hosts]\nacme = acme_host:Acme\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_host", raising=False)
    return monkeypatch


def installed(tmp_path: Path, module: str) -> None:
    (tmp_path / "acme_host.py").write_text(module)


def verified(op: str = "silu_and_mul", case: str = "") -> Report:
    return verify("interposer-ops", op=op, case=case, host="acme", quick=True)


@pytest.mark.slow
@pytest.mark.usefixtures("announce")
def test_kernels_are_tested_in_every_layer_of_a_host(tmp_path: Path) -> None:
    installed(tmp_path, SOUND)
    report = verified()
    assert report.state == "correct"
    assert report.host == "acme 2.1"
    assert "in layers of acme 2.1" in str(report)
    assert Report.from_json(report.to_json()).host == "acme 2.1"
    tallies = [tally for c in report.in_state("correct") for tally in c.tallies]
    assert {tally.aspect for tally in tallies} == {"numerics"}
    assert all(tally.cases % 2 == 0 for tally in tallies)


@pytest.mark.usefixtures("announce")
def test_the_kernel_under_test_is_the_one_that_computes(tmp_path: Path) -> None:
    log = tmp_path / "told"
    spying = SOUND.replace("        x = arg", "        self.tell(op)\n        x = arg").replace(
        "    def layers",
        "    def tell(self, op):\n"
        "        from interposer import effective_config\n"
        f"        with open({str(log)!r}, 'a') as file:\n"
        "            file.write(str(effective_config().kernels[op]) + '\\n')\n\n"
        "    def layers",
    )
    installed(tmp_path, spying)
    report = verified()
    names = {f"{c.provider}/{c.name}" for c in report.in_state("correct")}
    assert len(names) >= 2
    assert all(any(name in line for line in log.read_text().splitlines()) for name in names)


@pytest.mark.usefixtures("announce")
def test_a_layer_that_computes_something_else_is_wrong(tmp_path: Path) -> None:
    installed(tmp_path, FAULTY)
    report = verified()
    assert report.state == "wrong"
    findings = [f for c in report.in_state("wrong") for t in c.tallies for f in t.findings]
    assert {finding.case.partition(":")[0] for finding in findings} == {"OtherGate"}
    assert all(finding.command.endswith("--quick --host acme") for finding in findings)


@pytest.mark.usefixtures("announce")
def test_an_op_without_a_layer_is_not_run(tmp_path: Path) -> None:
    installed(tmp_path, SOUND)
    report = verified("rms_norm")
    assert report.state == "not run"
    assert "no layer of acme 2.1 computes rms_norm" in str(report)


def test_an_unknown_host_is_named_with_the_group() -> None:
    with pytest.raises(UnknownNameError, match=r"(?s)host 'acmee'.*'interposer\.hosts'"):
        verify("interposer-ops", op="rms_norm", host="acmee")


@pytest.mark.usefixtures("announce")
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("class Acme: pass", "no subclass of interposer_testing.Host"),
        ("raise RuntimeError('libacme is missing')", "libacme is missing"),
        ("Beta = 1", "Acme"),
    ],
)
def test_a_host_that_cannot_be_loaded_states_the_reason(
    tmp_path: Path, module: str, reason: str
) -> None:
    installed(tmp_path, module)
    with pytest.raises(ConfigError, match=f"The host 'acme'.*{reason}"):
        verified()
