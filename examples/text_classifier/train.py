"""Classify lines of text by the package that they are from."""

from __future__ import annotations

import random
import sys
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import HashingVectorizer

import idletrain
from idletrain.nn.models import mlp

TINY = "--tiny" in sys.argv
PACKAGES = ("asyncio", "email", "logging", "unittest", "xml")
LINES = 200 if TINY else 2000  # of each package
FEATURES = 2048


def lines(package: str) -> list[str]:
    """Return distinct lines of a package's source with at least three words."""
    files = sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py"))
    text = (line.strip() for file in files for line in file.read_text(encoding="utf-8", errors="ignore").splitlines())
    return list(dict.fromkeys(line for line in text if len(line.split()) > 2))[:LINES]


def load() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return hashed words `[N, FEATURES]` and labels `[N]`, shuffled."""
    samples = [(line, label) for label, package in enumerate(PACKAGES) for line in lines(package)]
    random.Random(0).shuffle(samples)
    text, labels = zip(*samples, strict=True)
    hashed = HashingVectorizer(n_features=FEATURES, alternate_sign=False).transform(text)
    return hashed.toarray().astype(np.float32), np.array(labels)


def main() -> None:
    """Train and print the accuracy beside that of guessing."""
    x, y = load()
    test = len(y) // 5
    rounds = 3 if TINY else 30
    result = idletrain.fit(
        mlp([FEATURES, 512, len(PACKAGES)]),
        (x[test:], y[test:]),
        test=(x[:test], y[:test]),
        subnets=2,
        workers=2,
        local_steps=20,
        rounds=rounds,
        batch_size=64,
        optimizer={"name": "adamw", "lr": 1e-3},
        evaluate_every=rounds,
    )
    print(f"accuracy {result.summary['accuracy']:.3f}; guessing gives {1 / len(PACKAGES):.3f}")


if __name__ == "__main__":
    main()
