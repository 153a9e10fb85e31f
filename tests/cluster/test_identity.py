"""An identity travels as one text and shows its key to nobody."""

from __future__ import annotations

import datetime
import os
import stat
import subprocess
import sys
from pathlib import Path

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


def test_its_files_are_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        options = Identity("ca", "cert", "key").write(tmp_path / "identity")
    finally:
        os.umask(before)
    assert options[::2] == ("--tls-ca-file", "--tls-cert", "--tls-key")
    assert [Path(path).read_text() for path in options[1::2]] == ["ca", "cert", "key"]
    assert stat.S_IMODE((tmp_path / "identity").stat().st_mode) == 0o700
    assert {stat.S_IMODE(Path(path).stat().st_mode) for path in options[1::2]} == {0o600}


def test_a_dashboard_s_token_follows_from_the_key_alone() -> None:
    tokens = [Identity("ca", "cert", key).dashboard_token for key in ("one", "one", "two")]
    assert tokens[0] == tokens[1] != tokens[2]
    assert len(tokens[0]) == 64
    assert "one" not in tokens[0]
