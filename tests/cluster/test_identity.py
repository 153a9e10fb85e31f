"""An identity travels as one text and shows its key to nobody."""

from __future__ import annotations

import datetime
import subprocess
import sys

from idletrain.cluster import certificates
from idletrain.cluster.identity import Identity

SOON = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=4)


def test_an_identity_fits_a_standard_parameter_and_survives_it() -> None:
    identity = certificates.issue("a" * 63, ("worker",), SOON)["worker"]
    assert len(identity.as_json()) < 4096
    assert Identity.from_json(identity.as_json()) == identity


def test_no_representation_shows_the_key() -> None:
    identity = certificates.issue("night", ("worker",), SOON)["worker"]
    assert "PRIVATE" in identity.key
    assert "PRIVATE" not in f"{identity!r} {identity}"


def test_a_node_boots_without_torch_dask_and_what_issues_certificates() -> None:
    program = "import sys, idletrain.cli.main, idletrain.cloud.worker_node; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "distributed", "cryptography"} & set(done.stdout.split())
