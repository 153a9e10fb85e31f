"""What of a directory travels, what is refused before it does, and that nothing is unpacked elsewhere."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from idletrain.cloud import workdir
from idletrain.cloud.workdir import unsent
from idletrain.errors import DamageError, JobError
from idletrain.job_file import parse_job
from idletrain.storage import S3Prefix


def make(place: Path, *names: str) -> None:
    """Write files that hold their own names."""
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(name)


def ignore(place: Path, *lines: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / ".gitignore").write_text("\n".join(lines) + "\n")


def names(place: Path) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(workdir.pack(place))) as archive:
        return [name for name in archive.getnames() if not name.endswith(".gitignore")]


def test_code_travels_without_what_git_ignores(tmp_path: Path) -> None:
    ignore(tmp_path, "*.npz", "secret/")
    make(tmp_path, "mine", "large.npz", "secret/key", "sub/__pycache__/mine", f"{workdir.RUNS}/night/ledger")
    assert names(tmp_path) == ["mine"]


def test_runs_do_not_travel(tmp_path: Path) -> None:
    make(tmp_path, "code.py", "runs/coffee/wal", "runs/coffee/snapshots/0/network", "runs/notes.txt")
    assert names(tmp_path) == ["code.py", "runs/notes.txt"]


def test_files_that_machines_do_not_get_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "net.py", "data/x.npz", "big/x.npz", "code/net.py", "code/data/x.npz")
    ignore(tmp_path, "big/")
    here = "is of this directory, of which machines get nothing; name it as workdir: ."

    def told(workdir: str | None, train: str | None = None, factory: str = "net:net") -> list[str]:
        tree: dict[str, Any] = {"name": "t", "model": {"factory": factory}, "workdir": workdir}
        return unsent(parse_job({**tree, "data": {"train": train} if train else {"name": "digits"}}))

    assert told(None, "data/x.npz") == [f"data: data/x.npz {here}", f"model.factory: net.py {here}"]
    assert told(None, factory="idletrain.nn.models:mlp") == []
    assert told(None, "s3://bucket/x.npz", factory="idletrain.nn.models:mlp") == []
    assert told(".", "./data/x.npz") == told("code", "data/x.npz") == []
    assert [one.partition(": machines")[0] for one in told(".", "big/x.npz")] == [
        "data: big/x.npz is not in workdir ., or git ignores it"
    ]
    assert len(told("code", "../data/x.npz")) == 1


def test_nested_rules_decide_before_those_above_and_cannot_bring_back_what_an_ignored_directory_holds(
    tmp_path: Path,
) -> None:
    ignore(tmp_path, "*.log", "build/")
    ignore(tmp_path / "sub", "!keep.log", "/local")
    ignore(tmp_path / "build", "!mine")
    make(tmp_path, "local", "sub/local", "sub/deep/local", "build/mine", "top.log", "sub/keep.log", "sub/drop.log")
    assert names(tmp_path) == ["local", "sub/deep/local", "sub/keep.log"]


def test_rules_of_the_repository_that_a_directory_is_in_hold_there(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    make(repository, ".git/info/exclude")
    (repository / ".git" / "info" / "exclude").write_text("notes\n")
    ignore(tmp_path, "outside")
    ignore(repository, "/part/data", "secret")
    make(repository / "part", "data", "secret", "notes", "outside", "mine")
    assert names(repository / "part") == ["mine", "outside"]
    ignore(repository, "part/")
    with pytest.raises(JobError, match=r"part holds nothing that git does not ignore"):
        workdir.pack(repository / "part")


def test_a_link_within_travels_as_one(tmp_path: Path, prefix: S3Prefix) -> None:
    make(tmp_path / "from", "sub/mine")
    (tmp_path / "from" / "link").symlink_to("sub/mine")
    (tmp_path / "from" / "lib").symlink_to("sub")
    prefix.put(workdir.WORKDIR_KEY, workdir.pack(tmp_path / "from"))
    workdir.unpack(prefix, tmp_path / "to")
    assert (tmp_path / "to" / "link").read_text() == (tmp_path / "to" / "lib" / "mine").read_text() == "sub/mine"
    assert (tmp_path / "to" / "link").is_symlink()


@pytest.mark.parametrize("target", ["/etc/hostname", "../outside", "../..", "sub/../../outside"])
def test_a_link_that_leads_elsewhere_is_refused_unless_git_ignores_it(tmp_path: Path, target: str) -> None:
    place = tmp_path / "place"
    make(place, "sub/mine")
    (tmp_path / "outside").write_text("")
    (place / "sub" / "link").symlink_to(target if target.startswith("/") else f"../{target}")
    with pytest.raises(JobError, match=r"workdir: sub/link links to .*, which is not packed; put a copy"):
        workdir.pack(place)
    ignore(place, "link")
    assert names(place) == ["sub/mine"]


def test_what_is_neither_file_nor_link_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(JobError, match="workdir: pipe is no file, directory or link"):
        workdir.pack(tmp_path)


def test_code_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"workdir: .*none is not a directory"):
        workdir.pack(tmp_path / "none")


def test_code_that_is_too_large_is_given_up_early_with_the_largest_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workdir, "MAX_WORKDIR_BYTES", 1 << 20)
    (tmp_path / "a").write_bytes(os.urandom(1000))
    (tmp_path / "b").write_bytes(os.urandom(4 << 20))
    (tmp_path / "c").write_bytes(b"")
    os.truncate(tmp_path / "c", 1 << 40)  # a tebibyte of zeros: only who stops before it ends in time
    with pytest.raises(JobError, match=r"larger than 1 MiB packed; name large files .*, first c \(.*\), b \(4.2 MB\)"):
        workdir.pack(tmp_path)


def test_an_archive_writes_nowhere_else(tmp_path: Path, prefix: S3Prefix) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../escaped.py"))
    prefix.put(workdir.WORKDIR_KEY, content.getvalue())
    (tmp_path / "place").mkdir()
    with pytest.raises(DamageError, match=r"is damaged \(OutsideDestinationError"):
        workdir.unpack(prefix, tmp_path / "place")
    assert not (tmp_path / "escaped.py").exists()


def test_a_job_without_code_of_its_own_unpacks_nothing(tmp_path: Path, prefix: S3Prefix) -> None:
    workdir.unpack(prefix, tmp_path)
    assert list(tmp_path.iterdir()) == []
