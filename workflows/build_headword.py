"""Builds a real data set with 200,000 labels, most with one to three short texts, from two Debian packages.

A text is a paragraph of a dictionary entry (dict-gcide) or a gloss (wordnet-base), its labels are the headwords that it
explains. Features are the words that at least two texts have, weighted by tf-idf, with rows of length 1.

    apt-get install dict-gcide wordnet-base
    python workflows/build_headword.py ~/data/headword
    idletrain launch workflows/headword.yaml
"""

from __future__ import annotations

import argparse
import gzip
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

GCIDE = Path("/usr/share/dictd/gcide.dict.dz")
WORDNET = Path("/usr/share/wordnet")
WORD = re.compile(r"[a-z]+")
HEADING = re.compile(r"(\S[^\\\n]*?) *\\")  # the headword, and its pronunciation between backslashes
SOURCE = re.compile(r"\[[^\]]*\]")  # as in [1913 Webster]
POSITION = re.compile(r"\((?:a|p|ip)\)$")  # of an adjective, in WordNet's lemmas
LEAST_WORDS = 3  # shorter paragraphs explain nothing
LEAST_TEXTS = 2
TEST_SHARE = 0.05

Text = tuple[list[str], list[str]]  # its labels, its words


def paragraphs(gcide: Path) -> Iterator[Text]:
    """Paragraphs of the dictionary's entries, without headings and sources."""
    with gzip.open(gcide, "rt", encoding="utf-8", errors="replace") as file:
        parts = file.read().lower().split("\n\n")
    headword = ""
    for part in parts:
        if heading := HEADING.match(part):
            headword = heading[1].strip()
            part = part.partition("\n")[2]  # noqa: PLW2901
        words = WORD.findall(SOURCE.sub("", part))
        if headword and len(words) >= LEAST_WORDS:
            yield [headword], words


def glosses(wordnet: Path) -> Iterator[Text]:
    """Glosses of WordNet's sets of synonyms, which are the labels."""
    for path in sorted(wordnet.glob("data.*")):
        for line in path.read_text(encoding="utf-8").lower().splitlines():
            if not line.startswith("  "):  # the licence
                fields, _, gloss = line.partition("| ")
                _, _, _, count, *lemmas = fields.split(" ")
                names = (POSITION.sub("", name).replace("_", " ") for name in lemmas[: 2 * int(count, 16) : 2])
                yield sorted(set(names)), WORD.findall(gloss)


def lines_of(texts: Sequence[Text], training: Sequence[int]) -> tuple[list[str], int, int]:
    """Rows in the Extreme Classification Repository's format, and the numbers of features and labels.

    A word's weight is (1 + log2 of its count) * log(texts / texts that have it), counted on the training texts.
    """
    everywhere = Counter(word for _, words in texts for word in set(words))
    features = {word: i for i, (word, count) in enumerate(everywhere.most_common()) if count >= LEAST_TEXTS}
    seen = Counter(word for text in training for word in set(texts[text][1]))
    idf = {word: math.log(len(training) / max(1, seen[word])) for word in features}
    labels: dict[str, int] = {}
    lines = []
    for names, words in texts:
        counts = Counter(word for word in words if word in features)
        weights = {features[word]: (1 + math.log2(count)) * idf[word] for word, count in counts.items()}
        length = math.hypot(*weights.values()) or 1.0
        entries = " ".join(f"{feature}:{weight / length:.4g}" for feature, weight in sorted(weights.items()))
        numbers = sorted(labels.setdefault(name, len(labels)) for name in names)
        lines.append(f"{','.join(map(str, numbers))} {entries}\n" if entries else "")
    return lines, len(features), len(labels)


def main(argv: list[str] | None = None) -> None:
    """Build train.txt.gz and test.txt.gz."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("to", type=Path, help="the directory to write to")
    parser.add_argument("--gcide", type=Path, default=GCIDE)
    parser.add_argument("--wordnet", type=Path, default=WORDNET)
    asked = parser.parse_args(argv)
    for path, package in ((asked.gcide, "dict-gcide"), (asked.wordnet, "wordnet-base")):
        if not path.exists():
            sys.exit(f"{path} is not there; install the Debian package {package}, or say where it is")
    texts = [*paragraphs(asked.gcide), *glosses(asked.wordnet)]
    order = np.random.Generator(np.random.Philox(0)).permutation(len(texts)).tolist()
    split = int(len(texts) * TEST_SHARE)
    lines, features, labels = lines_of(texts, order[split:])
    asked.to.mkdir(parents=True, exist_ok=True)
    for name, at in (("test", order[:split]), ("train", order[split:])):
        rows = [lines[text] for text in at if lines[text]]
        with gzip.open(asked.to / f"{name}.txt.gz", "wt", compresslevel=5) as file:
            file.write(f"{len(rows)} {features} {labels}\n")
            file.writelines(rows)
        sys.stdout.write(f"{asked.to / name}.txt.gz: {len(rows)} rows, {features} words, {labels} headwords\n")


if __name__ == "__main__":
    main()
