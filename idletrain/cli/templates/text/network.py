"""A small causal language model and its text: job.yaml names both. Change what is here to your own."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from idletrain.nn.models import transformer

VOCABULARY, CONTEXT = 256, 64  # bytes
TEXT_BYTES = 500_000


def net(width: int = 64, blocks: int = 2) -> nn.Module:
    """Build the network: tokens `[B, T]` to logits `[B, T, VOCABULARY]`. Any torch.nn.Module does."""
    return transformer(VOCABULARY, CONTEXT, width=width, heads=4, hidden=4 * width, blocks=blocks)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of the next token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def load() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return (train, test), each tokens `[N, CONTEXT]` and for each the token after it.

    The text is `corpus.txt` in this folder, or else the source of Python's standard library.
    """
    own = Path("corpus.txt")
    files = [own] if own.exists() else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    tokens = np.frombuffer(text if own.exists() else text[:TEXT_BYTES], dtype=np.uint8).astype(np.int64)
    starts = np.arange(0, len(tokens) - CONTEXT - 1, CONTEXT)[:, None] + np.arange(CONTEXT)
    x, y = tokens[starts], tokens[starts + 1]
    test = len(x) // 10
    return (x[test:], y[test:]), (x[:test], y[:test])
