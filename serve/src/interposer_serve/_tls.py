"""The TLS context of a server that speaks HTTPS itself."""

from __future__ import annotations

import ssl
from pathlib import Path

from interposer.errors import ConfigError


class _EncryptedKeyError(Exception):
    """The private key needs a password."""


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a TLS context for a certificate chain and its private key, both in PEM files.

    Raises: ConfigError: a file cannot be read, is not a PEM file of its kind, needs a password, or
        the key does not belong to the certificate.
    """
    _check_file(certificate, "certificate", b"-----BEGIN CERTIFICATE-----")
    _check_file(key, "key", b"PRIVATE KEY-----")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except _EncryptedKeyError:
        raise ConfigError(
            f"--tls-key {key} is encrypted with a password. "
            f"Try: openssl pkey -in {key} -out FILE, and make FILE readable for the server only"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"--tls-key {key} does not belong to the first certificate in {certificate}. "
                "Try: the key with which this certificate was requested; in a chain, the server's "
                "own certificate must be first"
            ) from None
        raise ConfigError(
            f"OpenSSL cannot use --tls-certificate {certificate} with --tls-key {key}: {error}. "
            f"Try: openssl x509 -in {certificate} -noout -text, and openssl pkey -in {key} -check"
        ) from None
    return context


def _check_file(file: Path, kind: str, marker: bytes) -> None:
    """Raise ConfigError unless a file can be read and has a PEM block of its kind."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--tls-{kind} {file} cannot be read: {error.strerror}. Try: the path of a PEM file "
            "that the user of this process may read"
        ) from None
    if marker not in content:
        raise ConfigError(
            f"--tls-{kind} {file} has no line with {marker.decode()!r}, so it is no PEM file of a "
            f"{kind}. Try: openssl {'x509' if kind == 'certificate' else 'pkey'} -inform DER "
            f"-in {file} -out FILE, if it is a DER file"
        )


def _refuse_password() -> str:
    # Without this function, OpenSSL would ask for the password on the terminal.
    raise _EncryptedKeyError
