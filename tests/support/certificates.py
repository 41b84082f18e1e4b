"""Certificates for tests: a CA, what it issues, and the files of both."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Identity:
    """Files of a certificate and its key."""

    cert: Path
    key: Path

    def flags(self, *, ca: Path | None = None) -> list[str]:
        """For `psstore-server`."""
        mutual = [] if ca is None else ["--tls-ca", str(ca)]
        return ["--tls-cert", str(self.cert), "--tls-key", str(self.key), *mutual]


class TestCA:
    """Its certificate is in the file `pem`."""

    __test__ = False

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self.pem = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.pem))

    def issue(
        self, *names: str, file: str = "host", expired: bool = False, use: x509.ObjectIdentifier | None = None
    ) -> Identity:
        """A certificate for these names and addresses, in place of what was in those files. `use`: what it is for alone
        (default: for clients and servers)."""
        past = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)
        made = self._ca.issue_cert(
            *names, not_before=past - datetime.timedelta(days=1), not_after=past if expired else None
        )
        identity = Identity(self._folder / f"{file}.pem", self._folder / f"{file}.key")
        chain = [one.bytes() for one in made.cert_chain_pems]
        identity.cert.write_bytes(b"".join(chain) if use is None else self._for_use(chain[0], use))
        identity.key.write_bytes(made.private_key_pem.bytes())
        return identity

    def _for_use(self, pem: bytes, use: x509.ObjectIdentifier) -> bytes:
        made = x509.load_pem_x509_certificate(pem)
        builder = x509.CertificateBuilder(
            made.issuer,
            made.subject,
            made.public_key(),
            made.serial_number,
            made.not_valid_before_utc,
            made.not_valid_after_utc,
            [one for one in made.extensions if not isinstance(one.value, x509.ExtendedKeyUsage)],
        ).add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        key = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
