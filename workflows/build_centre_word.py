"""Builds a real data set with 100,000 labels from two Debian packages: predict a word from the words around it.

As SLIDE's Text8 task (arXiv 1903.03129): features are the words up to `--window` places away, the label is the word in
the middle. The text is that of dict-gcide (a dictionary of 5 million words) and wordnet-base (glosses).

    apt-get install dict-gcide wordnet-base
    python workflows/build_centre_word.py ~/data/centre-word
    idletrain launch workflows/centre-word.yaml
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GCIDE = Path("/usr/share/dictd/gcide.dict.dz")
WORDNET = Path("/usr/share/wordnet")
WORD = re.compile(r"[a-z]+")
FREQUENT = 1e-5  # words above this frequency are kept with probability sqrt(1e-5 / frequency) (word2vec's t)
TEST_SHARE = 0.05


def texts(gcide: Path, wordnet: Path) -> Iterator[str]:
    """Paragraphs of the dictionary and glosses of WordNet."""
    with gzip.open(gcide, "rt", encoding="utf-8", errors="replace") as file:
        yield from file.read().lower().split("\n\n")
    for path in sorted(wordnet.glob("data.*")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("  "):  # the licence
                yield line.partition("| ")[2].lower()


def numbered(paragraphs: Iterable[str], vocabulary: int) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """Words as their rank by frequency (-1 beyond the vocabulary), paragraph numbers, and the vocabulary's size."""
    ids: dict[str, int] = {}
    words, places = [], []
    for number, paragraph in enumerate(paragraphs):
        found = WORD.findall(paragraph)
        words += [ids.setdefault(word, len(ids)) for word in found]
        places += [number] * len(found)
    at = np.array(words, dtype=np.int64)
    order = np.argsort(-np.bincount(at), kind="stable")
    rank = np.full(len(ids), -1, dtype=np.int32)
    rank[order[:vocabulary]] = np.arange(min(vocabulary, len(ids)))
    return rank[at], np.array(places, dtype=np.int32), min(vocabulary, len(ids))


def chosen(words: NDArray[np.int32], rows: int, seed: int) -> NDArray[np.int64]:
    """Places whose word is to be predicted: frequent words thinned out, so that rare ones are seen."""
    random = np.random.Generator(np.random.Philox(seed))
    frequency = np.bincount(words[words >= 0]) / len(words)
    keep = np.minimum(1, np.sqrt(FREQUENT / np.maximum(frequency, 1e-12)))
    places = np.flatnonzero((words >= 0) & (random.random(len(words)) < keep[words]))
    return random.permutation(places)[:rows]


def write(
    path: Path, words: NDArray[np.int32], owner: NDArray[np.int32], at: NDArray[np.int64], size: int, window: int
) -> int:
    """Write rows for the places `at`; returns how many have any word around them."""
    lines = []
    for place in at:
        near = np.r_[max(0, place - window) : place, place + 1 : min(len(words), place + window + 1)]
        near = near[(owner[near] == owner[place]) & (words[near] >= 0)]
        if len(near):
            context, counts = np.unique(words[near], return_counts=True)
            entries = " ".join(f"{word}:{count}" for word, count in zip(context, counts, strict=True))
            lines.append(f"{words[place]} {entries}\n")
    with gzip.open(path, "wt", compresslevel=5) as file:
        file.write(f"{len(lines)} {size} {size}\n")
        file.writelines(lines)
    return len(lines)


def main(argv: list[str] | None = None) -> None:
    """Build train.txt.gz and test.txt.gz."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("to", type=Path, help="the directory to write to")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--vocabulary", type=int, default=100_000)
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--gcide", type=Path, default=GCIDE)
    parser.add_argument("--wordnet", type=Path, default=WORDNET)
    asked = parser.parse_args(argv)
    for path, package in ((asked.gcide, "dict-gcide"), (asked.wordnet, "wordnet-base")):
        if not path.exists():
            sys.exit(f"{path} is not there; install the Debian package {package}, or say where it is")
    words, owner, size = numbered(texts(asked.gcide, asked.wordnet), asked.vocabulary)
    places = chosen(words, asked.rows, seed=0)
    split = int(len(places) * TEST_SHARE)
    asked.to.mkdir(parents=True, exist_ok=True)
    for name, at in (("test", places[:split]), ("train", places[split:])):
        rows = write(asked.to / f"{name}.txt.gz", words, owner, at, size, asked.window)
        sys.stdout.write(f"{asked.to / name}.txt.gz: {rows} rows, {size} words\n")


if __name__ == "__main__":
    main()
