"""Folders of images."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

import idletrain
from idletrain.errors import JobError
from idletrain.job import DataSettings, ModelSettings, TrainingSettings
from idletrain.nn.data.images import FolderSource, ImageFolder
from idletrain.nn.prepare import from_settings


def draw(path: Path, grey: int, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, grey if mode == "L" else (grey,) * 3).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    draw(tmp_path / "train" / "dog" / "a.png", 255)
    draw(tmp_path / "train" / "dog" / "more" / "b.JPG", 0)
    draw(tmp_path / "train" / "cat" / "c.png", 51, mode="L")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    draw(tmp_path / "test" / "dog" / "d.png", 0)
    return tmp_path


def test_each_folder_is_a_class_in_the_order_of_names_and_pixels_become_floats(photos: Path) -> None:
    samples = FolderSource(str(photos / "train"), "data.train", num_workers=2).open()
    inputs, labels = samples.batch(np.arange(3))
    assert inputs.shape == (3, 3, 8, 8)
    assert labels.tolist() == [0, 1, 1]
    assert inputs.mean((1, 2, 3)).tolist() == pytest.approx([0.2, 1.0, 0.0])
    assert samples.loading.num_workers == 2


def test_test_images_have_the_numbers_of_the_training_data_s_classes(photos: Path) -> None:
    data = DataSettings(train=str(photos / "train"), test=str(photos / "test"), image_size=4)
    model = ModelSettings(factory="torch.nn:Flatten")
    with pytest.raises(JobError, match="has no parameter that requires a gradient"):
        from_settings(model, data, TrainingSettings())
    test = FolderSource(str(photos / "test"), "data.test", classes=("cat", "dog")).open()
    assert test.batch(np.array([0]))[1].tolist() == [1]
    with pytest.raises(JobError, match=r"data.test: .* has the class 'dog', which the training data do not have"):
        FolderSource(str(photos / "test"), "data.test", classes=("cat",)).open()


def test_a_call_with_a_test_folder_that_lacks_a_class_is_refused(photos: Path) -> None:
    train, test = ImageFolder(str(photos / "train")), ImageFolder(str(photos / "test"))
    with pytest.raises(JobError, match=r"test: its class 'dog' has the number 0, and in train 1; give .*classes=train"):
        idletrain.fit(nn.Flatten(), train, test)
    same = ImageFolder(str(photos / "test"), classes=train.classes)
    with pytest.raises(JobError, match="has no parameter that requires a gradient"):
        idletrain.fit(nn.Flatten(), train, same, run_dir=photos / "runs")


def test_settings_of_images_are_refused_for_other_data() -> None:
    data = DataSettings(name="digits", image_size=8, num_workers=2)
    with pytest.raises(JobError) as caught:
        from_settings(ModelSettings(factory="torch.nn:Flatten"), data, TrainingSettings())
    assert [fault for fault in caught.value.faults if fault.startswith("data.")] == [
        f"data.{field} goes with a folder of images in train alone; leave it out"
        for field in ("image_size: 8", "num_workers: 2")
    ]


def test_images_of_several_sizes_are_named_or_scaled_and_cut(photos: Path) -> None:
    draw(photos / "train" / "dog" / "wide.png", 0, (20, 10))
    with pytest.raises(JobError, match=r"data.train: .*wide.png has 20 x 10 pixels and the first image 8 x 8; set"):
        FolderSource(str(photos / "train"), "data.train").open().batch(np.arange(4))
    scaled = FolderSource(str(photos / "train"), "data.train", image_size=6).open()
    assert scaled.batch(np.arange(4))[0].shape == (4, 3, 6, 6)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda _: None, "cannot be read .No such file or directory.; name an existing folder"),
        (lambda path: path.mkdir(), "has no folders in it; make one for each class"),
        (lambda folder: (folder / "cat").mkdir(parents=True), "holds no images in its 1 folders"),
    ],
)
def test_a_folder_without_images_is_refused(tmp_path: Path, make: object, fault: str) -> None:
    make(tmp_path / "none")  # type: ignore[operator]
    with pytest.raises(JobError, match=f"data.train: .*{fault}"):
        FolderSource(str(tmp_path / "none"), "data.train").open()


def test_a_damaged_image_is_named(photos: Path) -> None:
    whole = (photos / "train" / "dog" / "a.png").read_bytes()
    (photos / "train" / "dog" / "a.png").write_bytes(whole[:40])
    with pytest.raises(OSError, match=r"dog/a.png is no sound image: "):
        ImageFolder(photos / "train")[1]


def test_a_folder_travels_without_its_list_of_files(photos: Path) -> None:
    there = pickle.loads(pickle.dumps(ImageFolder(photos / "train", 4)))
    assert there.files == ImageFolder(photos / "train", 4).files
    assert len(pickle.dumps(there)) < 400


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_images_of_16_bits_keep_their_greys(tmp_path: Path, name: str) -> None:
    greys = np.array([[0, 255, 256], [0x3FFF, 0x8000, 0xFFFF]], np.uint16)
    (tmp_path / "cat").mkdir()
    Image.fromarray(greys).save(tmp_path / "cat" / name)
    pixels, _ = ImageFolder(str(tmp_path))[0]
    assert pixels.dtype == np.uint8
    assert pixels.tolist() == [[[0, 0, 1], [0x3F, 0x80, 0xFF]]] * 3


@pytest.mark.parametrize(("dtype", "kind"), [(np.int32, "integers"), (np.float32, "floats")])
def test_an_image_whose_numbers_have_no_known_range_is_refused(photos: Path, dtype: type, kind: str) -> None:
    Image.fromarray(np.full((8, 8), 3, dtype)).save(photos / "train" / "cat" / "d.tiff")
    fault = rf"data: .*cat/d.tiff holds {kind} of 32 bits, whose range it does not say; save it with 8 or 16 bits, or"
    with pytest.raises(JobError, match=fault):
        ImageFolder(str(photos / "train"))[1]
