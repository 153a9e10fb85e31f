"""Data in S3: pinned to its version at the start of a run, and downloaded once per machine."""

from __future__ import annotations

import fcntl
import hashlib
from dataclasses import dataclass
from pathlib import Path

from idletrain.errors import JobError
from idletrain.storage import ObjectInfo, S3Prefix, UnreadableError

SCHEME = "s3://"


@dataclass(frozen=True)
class Remote:
    """An S3 object and its version when `find_remote` was called; small and picklable.

    Attributes:
        url: Its address, `s3://bucket/key`.
        stored: Its size and version tag.
    """

    url: str
    stored: ObjectInfo

    def __str__(self) -> str:
        return self.url

    def download(self, cache: Path, field: str) -> Path:
        """Return the path of the object's copy on this machine; one process downloads it if there is none.

        Args:
            cache: The folder of copies.
            field: The job's field that names the object.

        Raises:
            JobError: it cannot be read, is damaged, or has changed.
        """
        identity = hashlib.sha256(f"{self.url} {self.stored.tag}".encode()).hexdigest()[:16]
        copy = cache / f"{identity}-{self.url.rpartition('/')[2]}"
        if copy.exists():
            return copy
        cache.mkdir(parents=True, exist_ok=True)
        with copy.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not copy.exists():
                self._fetch(copy, field)
        return copy

    def _fetch(self, copy: Path, field: str) -> None:
        prefix, key = _split(self.url)
        partial = copy.with_suffix(".partial")
        try:
            prefix.fetch(key, self.stored, partial)
        except UnreadableError as error:
            partial.unlink(missing_ok=True)
            raise JobError(f"{field}: {self.url} cannot be read: {error}") from None
        partial.replace(copy)


def find_remote(url: str, field: str) -> Remote:
    """Return an object as it is stored now.

    Raises:
        JobError: it does not exist, or may not be read.
    """
    prefix, key = _split(url)
    if not prefix.bucket or not key or key.endswith("/"):
        raise JobError(f"{field}: {url!r} should be s3://bucket/key")
    try:
        return Remote(url, prefix.stat(key))
    except UnreadableError as error:
        raise JobError(f"{field}: {url} cannot be read: {error}") from None


def _split(url: str) -> tuple[S3Prefix, str]:
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    return S3Prefix.at(f"{SCHEME}{bucket}"), key
