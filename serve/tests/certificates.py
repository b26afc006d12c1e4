"""Certificates of a server for tests, made by the program openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SUBJECT = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")


def write_certificate(folder: Path, password: str = "") -> tuple[Path, Path]:
    """Write a self-signed certificate and its key, and return both paths."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the program openssl")
    folder.mkdir(exist_ok=True)
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    encryption = ("-passout", f"pass:{password}") if password else ("-nodes",)
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += [*encryption, "-days", "2", "-keyout", str(key), "-out", str(certificate), *SUBJECT]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key
