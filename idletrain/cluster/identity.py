"""The certificate and key that authenticate a machine of a run.

`certificates` issues them, in a module of its own: a booting node needs neither that nor half a second of Dask before
it has its identity.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from idletrain.errors import reading
from idletrain.storage import make_private, owner_only

if TYPE_CHECKING:
    from distributed.security import Security


OPTIONS = ("ca-file", "cert", "key")  # of `idletrain worker --tls-...`, and names of their files


@dataclass(frozen=True, repr=False)
class Identity:
    """A role's certificate and key as PEM texts; no `repr`, so that no log ever shows the key."""

    ca: str
    cert: str
    key: str

    def as_json(self) -> str:
        """Return it as one JSON text of under 4 KB, the size of a standard parameter in AWS' parameter store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Identity:
        """Read what `as_json` wrote.

        Raises:
            DamageError: it is something else.
        """
        with reading("the run's secret", "end the run with `idletrain down` and go on with --resume"):
            fields = json.loads(text)
            return cls(*(fields[part] + "" for part in ("ca", "cert", "key")))  # texts, or no such thing

    def write(self, directory: Path) -> tuple[str, ...]:
        """Write it as files that only this user can read; return the options of `idletrain worker` that name them."""
        make_private(directory)
        for option, text in zip(OPTIONS, (self.ca, self.cert, self.key), strict=True):
            with open(directory / option, "w", opener=owner_only) as file:
                file.write(text)
        return tuple(part for option in OPTIONS for part in (f"--tls-{option}", str(directory.absolute() / option)))

    @property
    def dashboard_token(self) -> str:
        """The token that the dashboard of a scheduler with this identity asks for; it follows from the key."""
        return hmac.new(self.key.encode(), b"dashboard", hashlib.sha256).hexdigest()

    def security(self) -> Security:
        """Return Dask's TLS settings for a process that uses this identity for all its connections."""
        from distributed.security import Security

        roles = ("scheduler", "worker", "client")
        files = {f"tls_{role}_{part}": getattr(self, part) for role in roles for part in ("cert", "key")}
        return Security(tls_ca_file=self.ca, require_encryption=True, **files)
