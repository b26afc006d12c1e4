"""One platform and a kernel that runs there only."""

from __future__ import annotations

from interposer import Kernel, PlatformEntry, Requires, hookimpl
from interposer.records import Record

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records() -> list[Record]:
    """Return the platform and its kernel."""
    return [
        PlatformEntry(
            name="acme",
            target="acme_platform.platform:AcmePlatform",
            score=-1.0,
            driver_files=("/opt/acme-board/driver.version",),
        ),
        Kernel(
            op="rms_norm",
            name="rms_norm_board",
            target="acme_platform.kernels:rms_norm",
            platform="acme",
            requires=Requires(features=frozenset({"dot8"}), architectures=frozenset({"acme-1"})),
            score=90.0,
        ),
    ]
