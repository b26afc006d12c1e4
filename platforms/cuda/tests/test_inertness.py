"""On a machine without an NVIDIA GPU the plugin only adds one line that says so."""

from __future__ import annotations

import pytest
from platforms.inertness import MODEL, InertPlugin

from interposer_cuda._hardware.system import read_system

pytestmark = [
    pytest.mark.skipif(bool(read_system().nodes), reason="needs a machine without a GPU of NVIDIA"),
    pytest.mark.process,
]


class TestInertness(InertPlugin):
    platform = "cuda"
    absence = "no GPU of NVIDIA"
    libraries = ("libcuda", "libnvidia", "libnvrtc")

    @pytest.mark.landing(1)
    @pytest.mark.parametrize(
        "statement",
        [
            "import interposer_cuda.plugin",
            "import interposer_cuda._platform",
            "from interposer_cuda._platform import CUDAPlatform; assert not CUDAPlatform.probe()",
            "import interposer; interposer.place()",
            f"import interposer; interposer.explain({str(MODEL)!r}, 'h100')",
        ],
    )
    def test_nothing_of_the_vendor_is_loaded(self, statement: str) -> None:
        self.assert_nothing_is_loaded(statement)
