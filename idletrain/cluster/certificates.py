"""Issue a run's own certificates: one authority, one certificate a role, none valid for over a day after the run.

Dask fully trusts any certificate of the authority, so an authority is never used for two runs, and its key is dropped
as soon as the roles have their certificates.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from idletrain.cluster.identity import Identity

GRACE = datetime.timedelta(days=1)  # for a clock that runs late, or a last visit to a run that has ended
CLOCK_SKEW = datetime.timedelta(minutes=10)
Span = tuple[datetime.datetime, datetime.datetime]  # from when, until when


def issue(
    run: str, roles: Sequence[str], until: datetime.datetime, since: datetime.datetime | None = None
) -> dict[str, Identity]:
    """Return a certificate and key for each of a run's roles, signed by an authority made for this run.

    Args:
        run: The run's name, put into the subjects.
        roles: Such as `head` and `worker`.
        until: When the run ends at the latest (UTC).
        since: When they begin to hold; ten minutes ago, for clocks that run late, if None.
    """
    authority_key = ec.generate_private_key(ec.SECP256R1())
    span = since or datetime.datetime.now(datetime.UTC) - CLOCK_SKEW, until + GRACE
    name = _name(run, "authority")
    authority = (
        _builder(name, name, authority_key.public_key(), span)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    return {role: _identity(run, role, span, authority, authority_key) for role in roles}


def _identity(
    run: str,
    role: str,
    span: Span,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        _builder(_name(run, role), authority.subject, key.public_key(), span)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=False)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Identity(_pem(authority), _pem(certificate), private.decode())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, span: Span
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(span[0])
        .not_valid_after(span[1])
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """Return the key usage that strict checkers, such as Python 3.13's, require in every certificate."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(run: str, role: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, run), x509.NameAttribute(NameOID.COMMON_NAME, role)]
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
