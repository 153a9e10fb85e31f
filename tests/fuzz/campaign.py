"""Search for bytes that break a reader, by coverage (atheris, libFuzzer).

python tests/fuzz/campaign.py [1/N | SECONDS]

Without an argument, each reader gets its number of runs, about a minute of a core, from one seed: the same bytes every
time; with 1/N, an Nth of them. With SECONDS, each gets that long, from a seed of its own. Two readers at a time. What
breaks one is left in a file here, and becomes one of the reader's odd bytes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MEMORY_MB, SLOW_SECONDS, LONGEST_BYTES, AT_ONCE = 4096, 120, 4096, 2
SEED = 1


def search(name: str, *limits: str) -> None:
    """Fuzz one reader; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["idletrain"], enable_loader_override=False):
        import readers
    from reader import quiet

    warnings.simplefilter("ignore")
    quiet()
    reader, found = readers.READERS[name], Path(f"fuzz-{re.sub('[^a-z]', '-', name)}-").absolute()

    def one(content: bytes) -> None:
        reader.accepts(content)

    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)  # readers write here; the same names every time, as libFuzzer learns from comparisons
        Path("corpus").mkdir()
        for number, seed in enumerate((*reader.sound, *reader.odd)):
            Path("corpus", str(number)).write_bytes(seed)
        options = (f"-artifact_prefix={found}", f"-max_len={LONGEST_BYTES}", f"-rss_limit_mb={MEMORY_MB}")
        options += (f"-timeout={SLOW_SECONDS}", "-reload=0")  # it would read its own corpus again, by the clock
        atheris.Setup([sys.argv[0], *limits, *options, "corpus"], one)
        atheris.Fuzz()


def all_of_them(amount: str) -> int:
    """Fuzz every reader in a process of its own; return the number of those that broke."""
    from readers import READERS

    def run(name: str) -> int:
        part = amount.removeprefix("1/")
        runs = [f"-runs={READERS[name].runs // int(part)}", f"-seed={SEED}"]
        limits = runs if part != amount else [f"-max_total_time={amount}"]
        command = [sys.executable, __file__, name, *limits]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, check=False)
        told = done.stdout.decode(errors="replace")
        last = told[-4000:] if done.returncode else "\n".join(re.findall("^(?:#.* DONE|Done).*", told, re.MULTILINE))
        print(f"{name}: {'broke' if done.returncode else 'sound'}\n{last}", flush=True)
        return bool(done.returncode)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(run, READERS))


if __name__ == "__main__":
    match sys.argv[1:]:
        case [name, limit, *more] if limit.startswith("-"):
            search(name, limit, *more)
        case [amount]:
            sys.exit(all_of_them(amount))
        case []:
            sys.exit(all_of_them("1/1"))
