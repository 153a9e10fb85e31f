"""Folders of images: one folder for each class, as torchvision's ImageFolder has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from idletrain.errors import JobError, user_code
from idletrain.nn.data.datasets import Loading, MapStyleSource
from idletrain.nn.data.values import Array

OF_16_BITS = ("PNG", "PPM")  # formats whose integers that Pillow takes for 32 bits have 16
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


class ImageFolder:
    """A Dataset of images `[3, height, width]` in 8 bits and their classes, numbered in the order of their names.

    It is listed again on every machine, so it should be in the same place there.

    Args:
        path: The folder; in it is one folder for each class, with the images anywhere below.
        image_size: Height and width that images are scaled to (the shorter side, then the middle is cut out); None for
            images that have one size already.
        classes: The names of the folders; all that there are if None.
        field: The job's field that names the folder, for faults.

    Raises:
        JobError: there is no such folder, no image in it, or a class that is not one of `classes`.
    """

    def __init__(
        self,
        path: str,
        image_size: int | None = None,
        classes: Sequence[str] | None = None,
        field: str = "data",
    ) -> None:
        self.path, self.image_size, self.field = Path(path), image_size, field
        found = _folders(self.path, field)
        self.classes = tuple(found if classes is None else classes)
        if others := sorted(set(found) - set(self.classes)):
            raise JobError(f"{field}: {path} has the class {others[0]!r}, which the training data do not have")
        self.files = [
            (file, number)
            for number, name in enumerate(self.classes)
            for file in sorted((self.path / name).rglob("*"))
            if file.suffix.lower() in IMAGE_SUFFIXES
        ]
        if not self.files:
            raise JobError(f"{field}: {path} holds no images in its {len(found)} folders; one folder is one class")
        self._size = (image_size, image_size) if image_size else _opened(self.files[0][0], field).size

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle where the images are, and not the list of files."""
        return ImageFolder, (str(self.path), self.image_size, self.classes, self.field)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Array, int]:
        file, label = self.files[number]
        image = _opened(file, self.field)
        if self.image_size:
            image = _scaled(image, self.image_size)
        if image.size != self._size:
            raise JobError(
                f"{self.field}: {file} has {image.size[0]} x {image.size[1]} pixels and the first image "
                f"{self._size[0]} x {self._size[1]}; set data.image_size to scale all to one size"
            )
        return np.asarray(image).transpose(2, 0, 1), label


def _folders(path: Path, field: str) -> list[str]:
    try:
        found = sorted(folder.name for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    except OSError as error:
        raise JobError(f"{field}: {path} cannot be read ({error.strerror}); name an existing folder") from None
    if not found:
        raise JobError(f"{field}: {path} has no folders in it; make one for each class, with its images")
    return found


def _opened(file: Path, field: str) -> Any:
    """Return an image in colours of 8 bits; of one of 16 bits, the upper 8, as Pillow itself does with colours.

    Raises:
        JobError: Pillow is missing, or the image's numbers have no known range.
        OSError: the file is damaged; its text names the file.
    """
    with user_code("data: images are read by Pillow, which is not installed (", "); pip install pillow"):
        from PIL import Image
    try:
        with Image.open(file) as image:
            if image.mode.startswith("I;16") or (image.mode == "I" and image.format in OF_16_BITS):
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            if image.mode in ("I", "F"):
                kind = "integers" if image.mode == "I" else "floats"
                raise JobError(
                    f"{field}: {file} holds {kind} of 32 bits, whose range it does not say; save it with 8 or 16 bits, "
                    "or read and scale it in a Dataset of your own"
                )
            return image.convert("RGB")
    except JobError:
        raise
    except Exception as error:
        raise OSError(f"{file} is no sound image: {error}") from error


def _scaled(image: Any, size: int) -> Any:
    """Scale the shorter side to `size` and cut out the middle."""
    width, height = image.size
    ratio = size / min(width, height)
    scaled = image.resize((max(size, round(width * ratio)), max(size, round(height * ratio))))
    left, top = (scaled.size[0] - size) // 2, (scaled.size[1] - size) // 2
    return scaled.crop((left, top, left + size, top + size))


@dataclass(frozen=True)
class FolderSource:
    """A folder of images that a job names.

    Attributes:
        path: The folder.
        field: The job's field that names it.
        image_size: See `ImageFolder`.
        classes: The training data's classes; None for the training data themselves.
        num_workers: Processes that read images ahead.
    """

    path: str
    field: str
    image_size: int | None = None
    classes: tuple[str, ...] | None = None
    num_workers: int = 0

    def open(self) -> MapStyleSource:
        images = ImageFolder(self.path, self.image_size, self.classes, self.field)
        return MapStyleSource(images, loading=Loading(num_workers=self.num_workers))
