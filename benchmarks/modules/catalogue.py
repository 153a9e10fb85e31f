"""All modules that are tried."""

from __future__ import annotations

from benchmarks.modules import images, others, texts

CASES = [*images.CASES, *texts.CASES, *others.CASES]
