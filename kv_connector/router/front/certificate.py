"""Certificate: the router's own certificate, with which its port speaks HTTPS."""

from __future__ import annotations

import ssl
from pathlib import Path


class CertificateError(ValueError):
    """The files hold no certificate with its key. The message says what to do."""


class Certificate:
    """A certificate and its key, which can be read again while connections are open."""

    def __init__(self, certificate: Path, key: Path | None) -> None:
        """Raises CertificateError. ``key``: file of the private key; None: it is in the other file."""
        self._certificate, self._key = certificate, key
        self.context = self.read()
        """For the server's sockets. After present() it presents the new certificate in new connections."""
        self._latest = self.context
        self.context.sni_callback = self._choose

    def read(self) -> ssl.SSLContext:
        """Returns what the files hold now. Raises CertificateError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and newer
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            files = str(self._certificate) if self._key is None else f"{self._certificate} and {self._key}"
            raise CertificateError(
                f"cannot read a certificate and its private key from {files}: {error}. Change --ssl-certfile "
                "or --ssl-keyfile"
            ) from None
        return context

    def present(self, latest: ssl.SSLContext) -> None:
        """Has new connections present what read() has returned.

        No context that is in use reads a file. If the files were replaced between the reading of the
        certificate and of the key, it would be left without a key.
        """
        self._latest = latest

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Has a new connection use the latest certificate. Called for each, with or without a name."""
        connection.context = self._latest


def _no_password() -> str:
    """Ends the reading of an encrypted key. Without it OpenSSL asks at the terminal."""
    raise ValueError("the key is encrypted")
