"""Write train.txt and test.txt: sparse rows with labels, as the Extreme Classification Repository has them."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

FEATURES = 5000
OWN = 6  # features of a label
SHOWN = 4  # of these in a row
NOISE = 4  # other features in a row


def write(path: Path, rows: int, labels: int, random: np.random.Generator, own: np.ndarray) -> None:
    """Write a header and one line per row: `label feature:value ...`."""
    with path.open("w") as file:
        file.write(f"{rows} {FEATURES} {labels}\n")
        for label in random.integers(labels, size=rows):
            features = np.r_[random.choice(own[label], SHOWN, replace=False), random.integers(FEATURES, size=NOISE)]
            file.write(f"{label} {' '.join(f'{feature}:1' for feature in np.unique(features))}\n")


def main() -> None:
    """Write both files to the working directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--labels", type=int, default=5000)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    own = random.integers(FEATURES, size=(options.labels, OWN))
    write(Path("train.txt"), options.rows, options.labels, random, own)
    write(Path("test.txt"), options.rows // 20, options.labels, random, own)


if __name__ == "__main__":
    main()
