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
        """For the server's sockets. After reload() it presents the new certificate in new connections."""

    def read(self) -> ssl.SSLContext:
        """Returns what the files hold now. Raises CertificateError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and newer
        self._load(context)
        return context

    def reload(self) -> None:
        """Reads the files again. Raises CertificateError, and nothing changes."""
        self.read()  # a failure in the middle would leave the context with a key that does not fit
        self._load(self.context)

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            files = str(self._certificate) if self._key is None else f"{self._certificate} and {self._key}"
            raise CertificateError(
                f"cannot read a certificate and its private key from {files}: {error}. Change --ssl-certfile "
                "or --ssl-keyfile"
            ) from None


def _no_password() -> str:
    """Ends the reading of an encrypted key. Without it OpenSSL asks at the terminal."""
    raise ValueError("the key is encrypted")
