"""On a machine without an Intel GPU the plugin only adds refusals that say so."""

from __future__ import annotations

import pytest
from platforms.inertness import MODEL, InertPlugin

from interposer_xpu._hardware.system import read_system

pytestmark = [
    pytest.mark.skipif(bool(read_system().nodes), reason="needs a machine without a GPU of Intel"),
    pytest.mark.process,
]


class TestInertness(InertPlugin):
    platform = "xpu"
    absence = ""
    libraries = ("libze_", "libsycl", "libur_")
    packages = frozenset({"vllm_xpu_kernels"})
    torch_module = "xpu"

    @pytest.mark.landing(2)
    @pytest.mark.parametrize(
        "statement",
        [
            "import interposer_xpu.plugin",
            "import interposer_xpu._platform",
            "from interposer_xpu._platform import XPUPlatform; assert not XPUPlatform.probe()",
            "import interposer; interposer.place()",
            "import interposer_xpu._experts, interposer_xpu._routing",
            "import interposer_xpu._packages.kernel_package",
            "import interposer_xpu._fp8_linear, interposer_xpu._weight_only_linear",
            f"import interposer; interposer.explain({str(MODEL)!r}, 'b580')",
        ],
    )
    def test_nothing_of_the_vendor_is_loaded(self, statement: str) -> None:
        self.assert_nothing_is_loaded(statement)
