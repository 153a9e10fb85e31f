"""Made-up networks for the planner."""

from __future__ import annotations

import numpy as np

from idletrain.nn.outofcore.planning.profile import Profile, SwapLink, Unit

MB = 1_000_000


def made_up(n: int, seed: int, mbs: float = 100.0, parameters: bool = False) -> Profile:
    """A random network of `n` units whose times and sizes differ widely, on a link of `mbs` MB/s."""
    random = np.random.default_rng(seed)
    widths = [int(w) * MB for w in random.integers(1, 20, n + 1)]
    units = []
    for i in range(n):
        inner, seconds = int(random.integers(1, 40)) * MB, float(random.uniform(0.01, 0.1))
        units.append(
            Unit(
                name=f"u{i}",
                forward_seconds=seconds,
                backward_seconds=2 * seconds,
                recompute_seconds=seconds * float(random.uniform(0.2, 1)),
                input_bytes=widths[i],
                output_bytes=widths[i + 1],
                inner_bytes=inner,
                saves_input=bool(random.random() < 0.7),
                saves_output=bool(random.random() < 0.5),
                forward_bytes=widths[i + 1],
                saving_bytes=inner + widths[i + 1],
                backward_bytes=widths[i],
                parameter_bytes=int(random.integers(1, 5)) * MB if parameters else 0,
                state_bytes=2 * MB if parameters else 0,
                follows=bool(i and random.random() < 0.8),
            )
        )
    return Profile(tuple(units), SwapLink(mbs * MB, mbs * MB), batch_size=64, across_batch="its BatchNorm")
