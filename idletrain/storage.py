"""Write and read bytes that outlive the process: files that are whole or absent, and objects below an S3 prefix."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from idletrain.errors import RunError

CrashPoint = Callable[[str], None]  # called with the name of each point around a durable write: a test kills there
NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)
CONFLICT_TRIES, DOWNLOAD_TRIES = 3, 3
COPY_CHUNK_BYTES = 1 << 20
READ_ERRORS = {
    "403": "this account may not read it; name one that it may read, or ask its owner",
    "404": "there is no such object; name one that is there",
    "NoSuchBucket": "there is no such bucket; name one that is there",
    "PreconditionFailed": "it was replaced while the run went on; restore the first one, or start a new run",
}
DELETE_BATCH = 1000  # the limit of one DeleteObjects request


def cache_folder() -> Path:
    """Return where this user's downloads and measurements are kept; anybody may delete it."""
    return Path("~/.cache/idletrain").expanduser()


def state_folder() -> Path:
    """Return where this user's key and list of launches are kept, which nothing else can tell again."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "idletrain"


def make_private(directory: Path) -> None:
    """Make a directory that only this user can enter, whatever the umask, unless it exists; make its parents as usual.

    Raises:
        OSError: it cannot be made, or something else has its name.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def owner_only(path: str, flags: int) -> int:
    """Open a file as `open(..., opener=owner_only)`: one that is new is for this user alone, whatever the umask."""
    return os.open(path, flags, 0o600)


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Replace a file's content so that a reader sees either the old or the new, even after a power cut.

    The file is for this user alone.

    Raises:
        OSError: the disk is full, or writing is not permitted.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb", opener=owner_only) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make new and changed names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def only_head(run_dir: Path) -> Iterator[None]:
    """Hold a run directory for one head; the lock ends with the process, by whatever cause.

    Raises:
        RunError: another process runs it.
    """
    with open(run_dir / "lock", "a+", opener=owner_only) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunError(
                f"run {run_dir} is going on in process {file.read().strip()}; wait for it or stop it with Ctrl-C"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def head_of(run_dir: Path) -> int | None:
    """Return the id of the process that holds this run directory now, or None; 0 before it has written its id."""
    try:
        with (run_dir / "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read().strip()
                return int(text) if text.isdecimal() else 0
    except (OSError, ValueError):  # there is none, or it is no lock
        return None
    return None


def has_head(run_dir: Path) -> bool:
    """Return whether a process holds this run directory now."""
    return head_of(run_dir) is not None


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Within the context, raise S3's errors as `UnreadableError`, with what to do."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        yield
    except NoCredentialsError:
        raise UnreadableError("there are no credentials; run `aws configure`, or set AWS_PROFILE") from None
    except ClientError as error:
        code = error.response["Error"]["Code"]
        raise UnreadableError(READ_ERRORS.get(code, f"S3 says {code}")) from None
    except BotoCoreError as error:
        raise UnreadableError(str(error)) from None


class ConflictError(Exception):
    """An object changed since the writer last read it: somebody else wrote it."""


@dataclass(frozen=True)
class TaggedContent:
    """An object's content, and its tag for conditional writes."""

    content: bytes
    tag: str


class UnreadableError(Exception):
    """An object cannot be read; the text says why."""


@dataclass(frozen=True)
class ObjectInfo:
    """An object without its content.

    Attributes:
        size_bytes: The content's size.
        tag: Its ETag, which differs for different content.
        hashed: Whether the tag is the content's MD5: true of an object written in one piece and not encrypted with a
            key of the user's (S3, "Common response headers").
    """

    size_bytes: int
    tag: str
    hashed: bool


class S3Prefix:
    """Objects below one S3 prefix, by key.

    Args:
        client: A boto3 S3 client.
        bucket: The bucket's name.
        prefix: What all keys begin with; ends in `/`, or is empty.
    """

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self.client, self.bucket, self.prefix = client, bucket, prefix

    @classmethod
    def at(cls, url: str, client: Any = None) -> S3Prefix:
        """Return the prefix that `s3://bucket/path` names, with the environment's client unless one is given."""
        bucket, _, path = url.removeprefix("s3://").partition("/")
        if client is None:
            import boto3

            client = boto3.client("s3")
        return cls(client, bucket, f"{path.rstrip('/')}/" if path.strip("/") else "")

    def beside(self, name: str) -> S3Prefix:
        """Return the prefix of another run in the same place."""
        parent, _, _ = self.url.rstrip("/").rpartition("/")
        return S3Prefix.at(f"{parent}/{name}", self.client)

    @property
    def url(self) -> str:
        """The prefix as `s3://bucket/path/`."""
        return f"s3://{self.bucket}/{self.prefix}"

    def below(self, name: str) -> S3Prefix:
        """Return the prefix one level down."""
        return S3Prefix(self.client, self.bucket, f"{self.prefix}{name}/")

    def get(self, key: str) -> TaggedContent | None:
        """Return an object, or None if there is none."""
        try:
            response = self.client.get_object(Bucket=self.bucket, Key=self.prefix + key)
        except self.client.exceptions.NoSuchKey:
            return None
        return TaggedContent(response["Body"].read(), response["ETag"])

    def put(self, key: str, content: bytes) -> None:
        """Write an object, replacing any earlier one."""
        self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=content)

    def put_file(self, key: str, path: Path) -> None:
        """Write an object from a file of any size."""
        self.client.upload_file(str(path), self.bucket, self.prefix + key)

    def get_file(self, key: str, path: Path) -> None:
        """Write an object of any size to a file; read it again if it is replaced meanwhile, as a head at work does.

        Raises:
            RunError: it is replaced whenever it is read.
        """
        from s3transfer.exceptions import S3DownloadFailedError

        for _ in range(DOWNLOAD_TRIES):
            with contextlib.suppress(S3DownloadFailedError):
                self.client.download_file(self.bucket, self.prefix + key, str(path))
                return
        raise RunError(f"{self.url}{key} changes whenever it is read; try again")

    def stat(self, key: str) -> ObjectInfo:
        """Return an object's size and tag.

        Raises:
            UnreadableError: it is missing, or may not be read.
        """
        with _readable():
            response = self.client.head_object(Bucket=self.bucket, Key=self.prefix + key)
        tag: str = response["ETag"]
        keyless = response.get("ServerSideEncryption", "AES256") == "AES256"
        return ObjectInfo(response["ContentLength"], tag, hashed=keyless and "-" not in tag)

    def fetch(self, key: str, stored: ObjectInfo, path: Path) -> None:
        """Write an object to a file, if it is unchanged since `stat`.

        Raises:
            UnreadableError: it changed, cannot be read, or was damaged on the way.
        """
        digest, size = hashlib.md5(usedforsecurity=False), 0
        with _readable(), path.open("wb") as file:
            response = self.client.get_object(Bucket=self.bucket, Key=self.prefix + key, IfMatch=stored.tag)
            for chunk in response["Body"].iter_chunks(COPY_CHUNK_BYTES):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        if size != stored.size_bytes or (stored.hashed and digest.hexdigest() != stored.tag.strip('"')):
            raise UnreadableError("it came damaged; try again")

    def put_if(self, key: str, content: bytes, tag: str | None) -> str:
        """Write an object if it still has this tag, or, with None, if there is none; return the new tag.

        Raises:
            ConflictError: it has another tag; nothing was written.
        """
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        for tries_left in reversed(range(CONFLICT_TRIES)):
            try:
                response = self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=content, **condition)
            except self.client.exceptions.ClientError as error:
                status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                if status == HTTPStatus.CONFLICT and tries_left:  # two writers at once: S3 asks to try again
                    continue
                if status in (HTTPStatus.PRECONDITION_FAILED, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                    stored = self.get(key)
                    if stored and stored.content == content:  # our own write, sent again as its response was lost
                        return stored.tag
                    raise ConflictError(f"{self.url}{key} was written by somebody else") from None
                raise
            new_tag: str = response["ETag"]
            return new_tag
        raise AssertionError("unreachable")

    def names(self, under: str = "", after: str = "") -> list[str]:
        """Return the keys that begin with `under`, in order, leaving out those up to `after`."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.prefix + under, **({"StartAfter": self.prefix + after} if after else {})
        )
        return [item["Key"].removeprefix(self.prefix) for page in pages for item in page.get("Contents", ())]

    def folders(self) -> list[str]:
        """Return the names one level down."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.prefix, Delimiter="/"
        )
        prefixes = [item["Prefix"] for page in pages for item in page.get("CommonPrefixes", ())]
        return [name.removeprefix(self.prefix).rstrip("/") for name in prefixes]

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, ignoring those that do not exist."""
        objects = [{"Key": self.prefix + key} for key in keys]
        for start in range(0, len(objects), DELETE_BATCH):
            batch = {"Objects": objects[start : start + DELETE_BATCH], "Quiet": True}
            self.client.delete_objects(Bucket=self.bucket, Delete=batch)
