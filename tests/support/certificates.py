"""Certificates for tests: a CA, what it issues, and the files of both."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme


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

    def issue(self, *names: str, file: str = "host", expired: bool = False) -> Identity:
        """A certificate for these names and addresses, in place of what was in those files."""
        past = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)
        made = self._ca.issue_cert(
            *names, not_before=past - datetime.timedelta(days=1), not_after=past if expired else None
        )
        identity = Identity(self._folder / f"{file}.pem", self._folder / f"{file}.key")
        identity.cert.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
        identity.key.write_bytes(made.private_key_pem.bytes())
        return identity
