"""Ship the user's code to a cloud's machines: pack what git does not ignore at launch, unpack it on each machine.

Run directories are not packed.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

from idletrain.errors import JobError, reading
from idletrain.job import Job
from idletrain.storage import S3Prefix

WORKDIR_KEY = "workdir.tar.gz"
RUNS = Path(
    ".idletrain/runs"
)  # run directories on a head node, beside the code: never packed, so unpacking never overwrites them
MAX_WORKDIR_BYTES = 50 << 20
NEVER = GitIgnoreSpec.from_lines([".git", "__pycache__/", ".idletrain/"])
NAMED = 3  # largest files that an error names

Rules = tuple[Path, GitIgnoreSpec]
"""Ignore patterns, and the directory that they are relative to."""


class _FullError(Exception):
    """The archive has reached its size limit."""


class _Bounded(io.BytesIO):
    """A file in memory with a size limit."""

    def write(self, content: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(content) > MAX_WORKDIR_BYTES:
            raise _FullError
        return super().write(content)


def pack(workdir: Path) -> bytes:
    """Pack a directory into a tar.gz archive, without files that git ignores.

    Raises:
        JobError: it is not a directory, is empty, too large, or links to a file that is not packed.
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


def unsent(job: Job) -> list[str]:
    """Return a sentence for each file and module of this directory that a job names and that machines do not get."""
    paths = [path for path in job.data.paths if not path.startswith("s3://") and not Path(path).is_absolute()]
    if job.workdir is None:
        factories = {"model.factory": job.model.factory, "data.factory": job.data.factory}
        modules = [(field, factory.partition(":")[0]) for field, factory in factories.items() if factory]
        files = [("data", path) for path in paths]
        files += [(field, f"{module}.py") for field, module in modules if Path(f"{module}.py").exists()]
        return [
            f"{field}: {file} is of this directory, of which machines get nothing; name it as workdir: ."
            for field, file in files
        ]
    if not paths:
        return []  # without a walk through the directory
    workdir = Path(job.workdir).resolve()
    packed = [path.relative_to(workdir) for path in _files(workdir, _rules_above(workdir))] if workdir.is_dir() else []
    sent = {part for path in packed for part in (path, *path.parents)}
    return [
        f"data: {path} is not in workdir {job.workdir}, or git ignores it: machines get the rest alone; put it there, "
        "or in S3"
        for path in paths
        if Path(os.path.normpath(path)) not in sent
    ]


def unpack(prefix: S3Prefix, directory: Path) -> None:
    """Unpack the archive below a run's prefix, if there is one, into a directory.

    Raises:
        DamageError: it is none, or leads out of the directory.
    """
    if packed := prefix.get(WORKDIR_KEY):
        with (
            reading(prefix.url + WORKDIR_KEY, "launch the job under another name"),
            tarfile.open(fileobj=io.BytesIO(packed.content)) as archive,
        ):
            archive.extractall(directory, filter="data")


def _add(archive: tarfile.TarFile, path: Path, workdir: Path) -> None:
    name = path.relative_to(workdir)
    member = archive.gettarinfo(path, str(name))
    try:
        if member is None:  # a socket
            raise tarfile.SpecialFileError(tarfile.TarInfo(str(name)))
        tarfile.data_filter(member, str(workdir))  # the same filter as when unpacking
    except (tarfile.AbsoluteLinkError, tarfile.LinkOutsideDestinationError, tarfile.OutsideDestinationError):
        raise JobError(
            f"workdir: {name} links to {path.readlink()}, which is not packed; put a copy in its place, make the "
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
    """Yield the files and links below a directory that are not ignored, in order; links are not followed."""
    rules = [*above, *_rules_of(directory, ".gitignore")]
    for path in sorted(directory.iterdir()):
        is_directory = path.is_dir() and not path.is_symlink()
        is_run = is_directory and (path / "wal").exists()
        if is_run or _ignored(path, rules, is_directory=is_directory):
            continue
        if is_directory:
            yield from _files(path, rules)
        else:
            yield path


def _ignored(path: Path, rules: Sequence[Rules], *, is_directory: bool) -> bool:
    """Return whether git ignores a path: the last matching pattern decides, and deeper .gitignore files come last."""
    for base, patterns in ((path.parent, NEVER), *reversed(rules)):
        ignored = patterns.check_file(f"{path.relative_to(base)}{'/' if is_directory else ''}").include
        if ignored is not None:
            return ignored
    return False


def _rules_above(workdir: Path) -> list[Rules]:
    """Return the ignore rules of the enclosing repository: its info/exclude, and .gitignore files above `workdir`."""
    ancestors = [workdir, *workdir.parents]
    root = next((directory for directory in ancestors if (directory / ".git").exists()), None)
    if root is None:
        return []
    above = [directory for directory in reversed(ancestors[1:]) if directory.is_relative_to(root)]
    return [*_rules_of(root, ".git/info/exclude"), *(rule for directory in above for rule in _rules_of(directory))]


def _rules_of(directory: Path, name: str = ".gitignore") -> list[Rules]:
    try:
        lines = (directory / name).read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [(directory, GitIgnoreSpec.from_lines(lines))]


def _largest(files: Sequence[Path], workdir: Path) -> list[str]:
    by_size = sorted(files, key=lambda path: path.lstat().st_size, reverse=True)
    return [f"{path.relative_to(workdir)} ({path.lstat().st_size / 1e6:.1f} MB)" for path in by_size[:NAMED]]
