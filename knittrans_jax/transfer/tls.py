"""TLS for the bulk channel: one self-signed certificate per server, made at its start; clients trust that one only.

The certificate names no host: whoever proves to hold its key is the server, whatever its address. Who may speak to it is told
by tickets, as without TLS. The certificate must reach clients over a channel that they trust (the control channel).
"""

from __future__ import annotations

import os
import ssl
import subprocess
import tempfile
from pathlib import Path

VALID_DAYS = 3650
MAKE_TIMEOUT_S = 30.0


class TlsError(RuntimeError):
    """A certificate could not be made."""


def make_server() -> tuple[ssl.SSLContext, str]:
    """A server's context with a fresh key and certificate -> (context, the certificate as PEM, for `client_context`).

    The key lies in a file of this user's for a moment, and then in memory only.

    Raises:
        TlsError: no `openssl` command, which makes the certificate, or it failed.
    """
    with tempfile.TemporaryDirectory(prefix="knittrans-tls-") as folder:
        key, certificate = Path(folder, "key.pem"), Path(folder, "certificate.pem")
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-keyout", str(key), "-out", str(certificate), "-days", str(VALID_DAYS), "-subj", "/CN=knittrans"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=False, env=dict(os.environ)
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TlsError(f"TLS needs the command `openssl` to make a certificate: {error}") from error
        if done.returncode:
            raise TlsError(f"openssl made no certificate: {done.stderr.strip()[-500:]}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(certificate, key)
        return context, certificate.read_text()


def client_context(certificate: str) -> ssl.SSLContext:
    """A client's context that trusts the server of this certificate (PEM) alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the one trusted certificate says who it is
    context.load_verify_locations(cadata=certificate)
    return context
