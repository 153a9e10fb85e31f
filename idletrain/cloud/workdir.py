"""The user's own code on its way to a cloud's machines: packed as git sees it at launch, unpacked where it runs."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

from idletrain.errors import JobError
from idletrain.storage import S3Prefix

WORKDIR_KEY = "workdir.tar.gz"
RUNS = Path(".idletrain/runs")  # of a head, beside the code: never packed, so never overwritten by what was
MAX_WORKDIR_BYTES = 50 << 20
NEVER = GitIgnoreSpec.from_lines([".git", "__pycache__/", ".idletrain/"])
NAMED = 3  # of the largest files, in a refusal

Rules = tuple[Path, GitIgnoreSpec]
"""Ignore patterns, and the directory that they are relative to."""


class _FullError(Exception):
    """The archive is as large as it may be."""


class _Bounded(io.BytesIO):
    """A file in memory that takes so much and no more."""

    def write(self, content: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(content) > MAX_WORKDIR_BYTES:
            raise _FullError
        return super().write(content)


def pack(workdir: Path) -> bytes:
    """A directory as an archive, without what git ignores there.

    Raises:
        JobError: it is not a directory, holds nothing, does not fit, or links to what does not travel.
    """
    if not workdir.is_dir():
        raise JobError(f"workdir: {workdir} is not a directory; name the one that holds your code")
    workdir = workdir.resolve()
    files = list(_files(workdir, _rules_above(workdir)))
    if not files:
        raise JobError(f"workdir: {workdir} holds nothing that git does not ignore; name the one that holds your code")
    content = _Bounded()
    try:
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            for path in files:
                _add(archive, path, workdir)
    except _FullError:
        raise JobError(
            f"workdir: {workdir} is larger than {MAX_WORKDIR_BYTES >> 20} MiB packed; name large files in .gitignore, "
            f"first {', '.join(_largest(files, workdir))}"
        ) from None
    except OSError as error:
        raise JobError(f"workdir: {error.filename or workdir} cannot be read ({error.strerror})") from None
    return content.getvalue()


def unpack(prefix: S3Prefix, place: Path) -> None:
    """Bring what `pack` made, if a job has any, into the directory that Python looks in first."""
    if packed := prefix.get(WORKDIR_KEY):
        with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
            archive.extractall(place, filter="data")


def _add(archive: tarfile.TarFile, path: Path, workdir: Path) -> None:
    name = path.relative_to(workdir)
    member = archive.gettarinfo(path, str(name))
    try:
        if member is None:  # a socket
            raise tarfile.SpecialFileError(tarfile.TarInfo(str(name)))
        tarfile.data_filter(member, str(workdir))  # the very filter that unpacks it
    except (tarfile.AbsoluteLinkError, tarfile.LinkOutsideDestinationError, tarfile.OutsideDestinationError):
        raise JobError(
            f"workdir: {name} links to {path.readlink()}, which does not travel; put a copy in its place, make the "
            "link a relative one within the directory, or name it in .gitignore"
        ) from None
    except tarfile.FilterError:
        raise JobError(f"workdir: {name} is no file, directory or link; name it in .gitignore") from None
    if member.isreg():
        with path.open("rb") as file:
            archive.addfile(member, file)
    else:
        archive.addfile(member)


def _files(directory: Path, above: Sequence[Rules]) -> Iterator[Path]:
    """Files and links below a directory that no rule leaves out, in order; links are not followed."""
    rules = [*above, *_rules_of(directory, ".gitignore")]
    for path in sorted(directory.iterdir()):
        below = path.is_dir() and not path.is_symlink()
        if _ignored(path, rules, below=below):
            continue
        if below:
            yield from _files(path, rules)
        else:
            yield path


def _ignored(path: Path, rules: Sequence[Rules], *, below: bool) -> bool:
    """Whether git ignores a path: the last pattern that matches decides, deeper files' behind others."""
    for base, patterns in ((path.parent, NEVER), *reversed(rules)):
        verdict = patterns.check_file(f"{path.relative_to(base)}{'/' if below else ''}").include
        if verdict is not None:
            return verdict
    return False


def _rules_above(workdir: Path) -> list[Rules]:
    """What a repository that the directory is in ignores everywhere, and in the directories above this one."""
    inside = [workdir, *workdir.parents]
    root = next((place for place in inside if (place / ".git").exists()), None)
    if root is None:
        return []
    above = [place for place in reversed(inside[1:]) if place.is_relative_to(root)]
    return [*_rules_of(root, ".git/info/exclude"), *(rule for place in above for rule in _rules_of(place))]


def _rules_of(directory: Path, name: str = ".gitignore") -> list[Rules]:
    try:
        lines = (directory / name).read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [(directory, GitIgnoreSpec.from_lines(lines))]


def _largest(files: Sequence[Path], workdir: Path) -> list[str]:
    by_size = sorted(files, key=lambda path: path.lstat().st_size, reverse=True)
    return [f"{path.relative_to(workdir)} ({path.lstat().st_size / 1e6:.1f} MB)" for path in by_size[:NAMED]]
