"""What a machine of a run proves itself with. Apart from `certificates`, which issues it: a booting node needs neither
the issuing nor half a second of Dask before it has its identity.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed.security import Security


@dataclass(frozen=True, repr=False)
class Identity:
    """What a role proves itself with: PEM texts; no `repr`, so that no log ever shows the key."""

    ca: str
    cert: str
    key: str

    def as_json(self) -> str:
        """One text, of under 4 KB: the size of a standard parameter in AWS' parameter store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Identity:
        """The reverse of `as_json`."""
        return cls(**json.loads(text))

    def security(self) -> Security:
        """Dask's settings for a process that is this role towards everyone."""
        from distributed.security import Security

        roles = ("scheduler", "worker", "client")
        files = {f"tls_{role}_{what}": getattr(self, what) for role in roles for what in ("cert", "key")}
        return Security(tls_ca_file=self.ca, require_encryption=True, **files)
