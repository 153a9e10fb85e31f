"""What lets a user's own processes reach a run lies in files of the user's own, as long as the run trains."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from idletrain.cluster import access
from idletrain.errors import RunError
from idletrain.storage import only_head

PAGE = "http://127.0.0.1:1/idletrain"


def while_issued(run_dir: Path, check: Any) -> None:
    async def run() -> None:
        async with access.issued(run_dir, "night") as (identity, options):
            check(identity, options)

    asyncio.run(run())


def test_the_files_are_for_this_user_alone_and_go_with_the_run(tmp_path: Path) -> None:
    def check(identity: Any, options: tuple[str, ...]) -> None:
        files = list(access.folder_of(tmp_path).iterdir())
        assert {str(file) for file in files} > set(options[1::2])
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        assert stat.S_IMODE(access.folder_of(tmp_path).stat().st_mode) == 0o700
        assert access.link(tmp_path, PAGE) == f"{PAGE}?token={identity.dashboard_token}"
        events: list[Any] = []
        show = access.with_link(tmp_path, events.append)
        show({"kind": "run_started", "dashboard": PAGE})
        show({"kind": "staged"})
        assert events == [{"kind": "run_started", "dashboard": access.link(tmp_path, PAGE)}, {"kind": "staged"}]

    before = os.umask(0)
    try:
        while_issued(tmp_path, check)
    finally:
        os.umask(before)
    assert not access.folder_of(tmp_path).exists()
    assert access.link(tmp_path, PAGE) == PAGE


def test_what_a_killed_head_left_is_replaced(tmp_path: Path) -> None:
    access.folder_of(tmp_path).mkdir(mode=0o777)
    (access.folder_of(tmp_path) / "key").write_text("old")

    def check(identity: Any, _options: Any) -> None:
        assert (access.folder_of(tmp_path) / "key").read_text() == identity.key

    while_issued(tmp_path, check)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    access.folder_of(tmp_path).write_text("in the way")
    with pytest.raises(RunError, match="access cannot be written"):
        while_issued(tmp_path, lambda *_: None)


def test_a_run_is_found_while_its_head_trains(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps({"scheduler": "tls://127.0.0.1:1", "dashboard": PAGE, "pid": 1}))

    def check(identity: Any, _options: Any) -> None:
        with pytest.raises(RunError, match="does not train on this machine now"):
            access.find(tmp_path)  # no head holds the directory
        with only_head(tmp_path):
            found = access.find(tmp_path)
        assert found.scheduler == "tls://127.0.0.1:1"
        assert (found.ca_file.read_text(), found.key.read_text()) == (identity.ca, identity.key)

    while_issued(tmp_path, check)
    with pytest.raises(RunError, match="does not train on this machine now"):
        access.find(tmp_path)
    with pytest.raises(RunError, match="there is no run in"):
        access.find(tmp_path / "nobody")


@pytest.mark.skipif(os.getuid() != 0, reason="gives a directory to another user, which only root may")
def test_another_user_s_run_is_not_joined(tmp_path: Path) -> None:
    """Its scheduler could run code as this user."""
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(RunError, match="is another user's"):
        access.find(tmp_path)
