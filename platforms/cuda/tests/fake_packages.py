"""Versions and code of the stand-in packages, which compute on the CPU."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
VERSIONS = {
    "flash-attn": "2.8.3",
    "flash-attn-3": "3.0.0b2",
    "flash-mla": "1.0.0+48c6dc4",
    "flashinfer-python": "0.7.2",
}
FLASH = "from fake_flash import of_version_{} as flash_attn_with_kvcache"
MODULES = {
    "flash-attn": {
        "flash_attn": f"{FLASH.format(2)}, flash_attn_varlen_func\n",
        "fake_attention": "",
        "fake_flash": "",
    },
    "flash-attn-3": {"flash_attn_interface": FLASH.format(3)},
    "flash-mla": {"flash_mla": (HERE / "fake_flash_mla.py").read_text("utf-8")},
    "flashinfer-python": {"flashinfer": (HERE / "fake_flashinfer.py").read_text("utf-8")},
}
IMPORTED = {name for modules in MODULES.values() for name in modules}
