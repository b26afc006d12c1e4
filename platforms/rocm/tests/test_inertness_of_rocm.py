"""On a machine without an AMD GPU the plugin only adds one line that says so."""

from __future__ import annotations

import pytest
from platforms.inertness import MODEL, InertPlugin

from interposer_rocm._hardware.system import read_system

pytestmark = [
    pytest.mark.skipif(
        bool(read_system().files.nodes or read_system().files.on_bus),
        reason="needs a machine without a GPU of AMD",
    ),
    pytest.mark.process,
]


class TestInertness(InertPlugin):
    platform = "rocm"
    absence = "no GPU of AMD: no /dev/kfd and none on the bus"
    libraries = ("libamdhip", "libhsa", "librocm", "librocblas", "libhipblas")
    packages = frozenset({"aiter"})
    heavy = frozenset({"torch", "ctypes", "subprocess", "triton", "aiter"})

    @pytest.mark.landing(1)
    @pytest.mark.parametrize(
        "statement",
        [
            "import interposer_rocm.plugin",
            "from interposer_rocm import _platform, _scaled_gemm\n"
            "from interposer_rocm._aiter import flash, latent",
            "from interposer_rocm._platform import ROCmPlatform; assert not ROCmPlatform.probe()",
            "import interposer; interposer.place()",
            f"import interposer; interposer.explain({str(MODEL)!r}, 'mi300x')",
        ],
        ids=["plugin", "modules", "probe", "place", "plan"],
    )
    def test_nothing_of_the_vendor_is_loaded(self, statement: str) -> None:
        self.assert_nothing_is_loaded(statement)
