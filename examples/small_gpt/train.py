"""Train a small causal language model on bytes of text."""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import idletrain
from idletrain.nn.models import transformer

VOCABULARY = 256  # bytes
WIDTH = 64  # of the residual stream
CONTEXT = 64


def text_of_python(size: int) -> bytes:
    """Return the first bytes of the standard library's source."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(file.read_bytes() for file in files)[:size]


def windows(text: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return tokens `[N, CONTEXT]` and, for each, the token after it."""
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    starts = np.arange(0, len(tokens) - CONTEXT - 1, CONTEXT)[:, None] + np.arange(CONTEXT)
    return tokens[starts], tokens[starts + 1]


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the next token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def continued(module: nn.Module, prompt: bytes, count: int) -> bytes:
    """Return the prompt and the likeliest bytes after it."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(module(torch.tensor([tokens[-CONTEXT:]]))[0, -1].argmax()))
    return bytes(tokens)


def main() -> None:
    """Train, and print the loss and a continuation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="a file to learn; Python's own source otherwise")
    parser.add_argument("--tiny", action="store_true", help="a few seconds' run")
    options = parser.parse_args()
    size = 100_000 if options.tiny else 2_000_000
    x, y = windows(options.text.read_bytes() if options.text else text_of_python(size))
    test, rounds = len(x) // 10, 2 if options.tiny else 40
    torch.manual_seed(0)
    result = idletrain.fit(
        transformer(VOCABULARY, CONTEXT, width=WIDTH, heads=4, hidden=256, blocks=2),
        (x[test:], y[test:]),
        test=(x[:test], y[:test]),
        loss=next_token,
        subnets=2,
        workers=2,
        local_steps=10 if options.tiny else 50,
        rounds=rounds,
        batch_size=16,
        optimizer={"name": "adamw", "lr": 1e-3},
        evaluate_every=rounds,
    )
    loss = result.summary["loss"]
    print(f"loss {loss:.3f} ({loss / math.log(2):.2f} bits a byte); guessing gives {math.log(VOCABULARY):.3f}")
    print(continued(result.module, b"def ", 40))


if __name__ == "__main__":
    main()
