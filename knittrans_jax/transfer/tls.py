"""TLS for the bulk channel: one self-signed certificate per server, made at its start; clients trust that one only.

The certificate names no host: whoever proves to hold its key is the server, whatever its address. Who may speak to it is told
by tickets, as without TLS. The certificate must reach clients over a channel that they trust: it is part of the server's
address, `host:port#certificate`, which goes over the control channel.
"""

from __future__ import annotations

import base64
import os
import shutil
import ssl
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

VALID_DAYS = 3650
MAKE_TIMEOUT_S = 30.0


class ServerTls(NamedTuple):
    """What a server of the bulk channel needs: its context, and its certificate as PEM."""

    context: ssl.SSLContext
    certificate: str


class TlsError(RuntimeError):
    """A certificate could not be made."""


def is_available() -> bool:
    """Whether certificates can be made here."""
    return shutil.which("openssl") is not None


def make_server() -> ServerTls:
    """A server's context with a fresh key and certificate.

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
        return ServerTls(context, certificate.read_text())


def address_with(address: str, certificate: str) -> str:
    """`host:port#certificate`: the certificate (PEM) in base64 without line breaks."""
    return f"{address}#{base64.b64encode(ssl.PEM_cert_to_DER_cert(certificate)).decode()}"


def split_address(address: str) -> tuple[str, ssl.SSLContext | None]:
    """`host:port`, and the context of a client that trusts the certificate in the address; None where it has none.

    Raises:
        TlsError: what follows the `#` is no certificate.
    """
    where, _, encoded = address.partition("#")
    if not encoded:
        return where, None
    try:
        return where, client_context(ssl.DER_cert_to_PEM_cert(base64.b64decode(encoded, validate=True)))
    except (ValueError, ssl.SSLError) as error:
        raise TlsError(f"bulk address of {where}: what follows its # is no certificate ({error})") from error


def client_context(certificate: str) -> ssl.SSLContext:
    """A client's context that trusts the server of this certificate (PEM) alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the one trusted certificate says who it is
    context.load_verify_locations(cadata=certificate)
    return context
