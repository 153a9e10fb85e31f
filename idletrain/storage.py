"""Bytes that outlive a process: files that are whole or not there, room that may run out, objects below an S3 prefix.

`reached` names the points around every durable write; a test kills the process at each of them.
"""

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

CrashPoint = Callable[[str], None]
NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)
CONFLICT_TRIES = 3
COPY_CHUNK_BYTES = 1 << 20
REASONS = {
    "403": "this account may not read it; name one that it may, or ask its owner",
    "404": "there is no such object; name one that is there",
    "NoSuchBucket": "there is no such bucket; name one that is there",
    "PreconditionFailed": "it was replaced while the run went on; put the first one back, or start a new run",
}
DELETE_BATCH = 1000  # the most that one DeleteObjects takes


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Replace a file's content so that a reader sees the old or the new, also after a power cut.

    Raises:
        OSError: there is no room, or no right to write.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def only_head(run_dir: Path) -> Iterator[None]:
    """Hold a run directory for one head; the lock goes with the process, however it ends.

    Raises:
        RunError: another process runs it.
    """
    with (run_dir / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise RunError(
                f"run {run_dir} is going on in process {file.read().strip()}; wait for it or stop it with Ctrl-C"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def has_head(run_dir: Path) -> bool:
    """Whether a process runs this run directory now."""
    try:
        with (run_dir / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Turn what S3 says into why an object cannot be read."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        yield
    except NoCredentialsError:
        raise UnreadableError("there are no credentials; run `aws configure`, or set AWS_PROFILE") from None
    except ClientError as error:
        code = error.response["Error"]["Code"]
        raise UnreadableError(REASONS.get(code, f"S3 says {code}")) from None
    except BotoCoreError as error:
        raise UnreadableError(str(error)) from None


class ConflictError(Exception):
    """An object is not as the writer took it to be: somebody else wrote it."""


@dataclass(frozen=True)
class TaggedContent:
    """An object's content, and the tag that this content has in conditional writes."""

    content: bytes
    tag: str


class UnreadableError(Exception):
    """An object cannot be read; says why."""


@dataclass(frozen=True)
class ObjectInfo:
    """An object without its content.

    Attributes:
        tag: Its ETag: another content has another.
        hashed: Whether the tag is the content's MD5, as of all that was written in one piece and not encrypted by a
            key of the user's (S3, "Common response headers").
    """

    size_bytes: int
    tag: str
    hashed: bool


class S3Prefix:
    """Bytes under keys below one S3 prefix.

    Args:
        client: A boto3 S3 client.
        bucket: The bucket's name.
        prefix: What all keys begin with; ends in `/`, or is empty.
    """

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self.client, self.bucket, self.prefix = client, bucket, prefix

    @classmethod
    def at(cls, url: str, client: Any = None) -> S3Prefix:
        """The prefix that an `s3://bucket/path` names, with the environment's client unless one is given."""
        bucket, _, path = url.removeprefix("s3://").partition("/")
        if client is None:
            import boto3

            client = boto3.client("s3")
        return cls(client, bucket, f"{path.rstrip('/')}/" if path.strip("/") else "")

    @property
    def url(self) -> str:
        """The prefix as `s3://bucket/path/`."""
        return f"s3://{self.bucket}/{self.prefix}"

    def below(self, name: str) -> S3Prefix:
        """The prefix one level down."""
        return S3Prefix(self.client, self.bucket, f"{self.prefix}{name}/")

    def get(self, key: str) -> TaggedContent | None:
        """An object, or None where there is none."""
        try:
            answer = self.client.get_object(Bucket=self.bucket, Key=self.prefix + key)
        except self.client.exceptions.NoSuchKey:
            return None
        return TaggedContent(answer["Body"].read(), answer["ETag"])

    def put(self, key: str, content: bytes) -> None:
        """Write an object, whatever was there."""
        self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=content)

    def put_file(self, key: str, path: Path) -> None:
        """Write an object from a file of any size."""
        self.client.upload_file(str(path), self.bucket, self.prefix + key)

    def get_file(self, key: str, path: Path) -> None:
        """Write an object of any size to a file."""
        self.client.download_file(self.bucket, self.prefix + key, str(path))

    def stat(self, key: str) -> ObjectInfo:
        """What is known of an object.

        Raises:
            UnreadableError: it is not there, or may not be read.
        """
        with _readable():
            answer = self.client.head_object(Bucket=self.bucket, Key=self.prefix + key)
        tag: str = answer["ETag"]
        plain = answer.get("ServerSideEncryption", "AES256") == "AES256"
        return ObjectInfo(answer["ContentLength"], tag, hashed=plain and "-" not in tag)

    def fetch(self, key: str, stored: ObjectInfo, path: Path) -> None:
        """Write an object to a file, if it is still what `stat` saw.

        Raises:
            UnreadableError: it is not, or cannot be read, or came damaged.
        """
        digest, size = hashlib.md5(usedforsecurity=False), 0
        with _readable(), path.open("wb") as file:
            answer = self.client.get_object(Bucket=self.bucket, Key=self.prefix + key, IfMatch=stored.tag)
            for chunk in answer["Body"].iter_chunks(COPY_CHUNK_BYTES):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        if size != stored.size_bytes or (stored.hashed and digest.hexdigest() != stored.tag.strip('"')):
            raise UnreadableError("it came damaged; try again")

    def put_if(self, key: str, content: bytes, tag: str | None) -> str:
        """Write an object if it still has this tag, or, with None, if there is none; returns the new tag.

        Raises:
            ConflictError: it has another; nothing was written.
        """
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        for tries_left in reversed(range(CONFLICT_TRIES)):
            try:
                answer = self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=content, **condition)
            except self.client.exceptions.ClientError as error:
                status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                if status == HTTPStatus.CONFLICT and tries_left:  # two writers at once: S3 asks to try again
                    continue
                if status in (HTTPStatus.PRECONDITION_FAILED, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                    found = self.get(key)
                    if (
                        found and found.content == content
                    ):  # our own write, whose answer was lost and that was sent again
                        return found.tag
                    raise ConflictError(f"{self.url}{key} was written by somebody else") from None
                raise
            new_tag: str = answer["ETag"]
            return new_tag
        raise AssertionError("unreachable")

    def names(self, under: str = "", after: str = "") -> list[str]:
        """Keys that begin with `under`, in order, without those up to `after`."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.prefix + under, **({"StartAfter": self.prefix + after} if after else {})
        )
        return [item["Key"].removeprefix(self.prefix) for page in pages for item in page.get("Contents", ())]

    def folders(self) -> list[str]:
        """What stands one level down."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.prefix, Delimiter="/"
        )
        found = [item["Prefix"] for page in pages for item in page.get("CommonPrefixes", ())]
        return [name.removeprefix(self.prefix).rstrip("/") for name in found]

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are no error."""
        doomed = [{"Key": self.prefix + key} for key in keys]
        for start in range(0, len(doomed), DELETE_BATCH):
            batch = {"Objects": doomed[start : start + DELETE_BATCH], "Quiet": True}
            self.client.delete_objects(Bucket=self.bucket, Delete=batch)
