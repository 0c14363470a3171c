"""Certificates that a test makes for itself: an authority, what it signs, files on disk."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)
LOOPBACK = ("127.0.0.1", "localhost")
USAGES = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH, "client auth": ExtendedKeyUsageOID.CLIENT_AUTH}
_OTHERS = "key_encipherment content_commitment data_encipherment key_agreement key_cert_sign crl_sign encipher_only decipher_only"
SIGNS = x509.KeyUsage(digital_signature=True, **dict.fromkeys(_OTHERS.split(), False))


@dataclass(frozen=True)
class Files:
    """PEM files of one certificate and its key."""

    cert: Path
    key: Path

    def replace(self, other: Files) -> None:
        """Takes over the other's content, each file in one moment."""
        for mine, theirs in ((self.cert, other.cert), (self.key, other.key)):
            fresh = mine.with_suffix(".new")
            fresh.write_bytes(theirs.read_bytes())
            os.replace(fresh, mine)


class Authority:
    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(_pem(self._certificate(self._name, self._key, (), 30 * DAY, authority=True)))

    def issue(self, label: str, *names: str, valid: datetime.timedelta = DAY, usages: Sequence[str] = ()) -> Files:
        """`names` = DNS names, addresses and URIs; `valid` from now on, negative = expired. `usages` as in a Certificate of cert-manager:
        what is made is for those alone and, as cert-manager does it, has no subject."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([] if usages else [x509.NameAttribute(NameOID.COMMON_NAME, label)])
        files = Files(self._folder / f"{label}.crt", self._folder / f"{label}.key")
        files.cert.write_bytes(_pem(self._certificate(subject, key, names, valid, authority=False, usages=usages)))
        files.key.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return files

    def _certificate(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        names: tuple[str, ...],
        valid: datetime.timedelta,
        authority: bool,
        usages: Sequence[str] = (),
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - 10 * DAY,
            not_valid_after=now + valid,
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(own, critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=not subject.rdns)
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage([USAGES[usage] for usage in usages if usage in USAGES]), critical=False)
            builder = builder.add_extension(SIGNS, critical=True)
        return builder.sign(self._key, hashes.SHA256())


def _general(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
