"""Write certificates for machines of one's own that a Dask scheduler connects."""

from __future__ import annotations

import datetime
from pathlib import Path

import yaml

from idletrain.cluster.certificates import issue
from idletrain.errors import JobError
from idletrain.storage import owner_only

ROLES = ("head", "worker")
VALID = datetime.timedelta(days=365)


def write_certificates(folder: Path) -> list[str]:
    """Write certificates of a new authority for a head and for its workers, and Dask's configuration for the head.

    Each role has a folder with the files `ca-file`, `cert` and `key`, which only this user can read; the head's has
    `dask.yaml` besides. They are valid for a year, and the authority's key is kept nowhere.

    Returns:
        The folders' names.

    Raises:
        JobError: they are there already, or cannot be written.
    """
    if there := [role for role in ROLES if (folder / role).exists()]:
        raise JobError(f"{folder}: has {', '.join(there)} already; name an empty folder")
    issued = issue("machines of one's own", ROLES, datetime.datetime.now(datetime.UTC) + VALID)
    try:
        for role, identity in issued.items():
            identity.write(folder / role)
        with open(folder / "head" / "dask.yaml", "w", opener=owner_only) as file:
            yaml.safe_dump(_dask_configuration((folder / "head").absolute()), file)
    except OSError as error:
        raise JobError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
    return list(ROLES)


def _dask_configuration(folder: Path) -> dict[str, object]:
    """Return the configuration by which a scheduler and its clients use the certificate in a folder."""
    own = {"cert": str(folder / "cert"), "key": str(folder / "key")}
    tls = {"ca-file": str(folder / "ca-file"), "scheduler": own, "worker": own, "client": own}
    return {"distributed": {"comm": {"require-encryption": True, "tls": tls}}}
