"""Search for bytes that break a reader, by coverage (atheris, libFuzzer): python tests/fuzz/campaign.py READER SECONDS.

Without a reader, all of them, two at a time. A finding ends the campaign with its bytes in a file; it becomes a seed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MEMORY_MB, SLOW_SECONDS, LONGEST_BYTES, AT_ONCE = 4096, 20, 4096, 2


def search(name: str, seconds: int) -> None:
    """Fuzz one reader; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["idletrain"], enable_loader_override=False):
        import readers
    warnings.simplefilter("ignore")
    readers.quiet()
    reader = readers.READERS[name]
    with tempfile.TemporaryDirectory() as place:
        readers.PLACE = Path(place)
        corpus = Path(place, "corpus")
        corpus.mkdir()
        for number, seed in enumerate(reader.seeds):
            (corpus / str(number)).write_bytes(seed)
        limits = (f"-max_total_time={seconds}", f"-rss_limit_mb={MEMORY_MB}", f"-timeout={SLOW_SECONDS}")
        options = (f"-artifact_prefix=fuzz-{name}-", f"-max_len={LONGEST_BYTES}", "-print_final_stats=1")
        atheris.Setup(
            [sys.argv[0], *limits, *options, str(corpus)], lambda content: readers.accepted(reader.read, content)
        )
        atheris.Fuzz()


def all_of_them(seconds: int) -> int:
    """Fuzz every reader in a process of its own; return the number of those that broke."""
    import readers

    def run(name: str) -> int:
        command = [sys.executable, __file__, name, str(seconds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        tail = (
            done.stdout[-4000:]
            if done.returncode
            else next((line for line in done.stdout.splitlines() if line.startswith("Done ")), "")
        )
        print(f"{name}: {'broke' if done.returncode else 'sound'}\n{tail}", flush=True)
        return bool(done.returncode)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(run, readers.READERS))


if __name__ == "__main__":
    match sys.argv[1:]:
        case [name, seconds]:
            search(name, int(seconds))
        case [seconds]:
            sys.exit(all_of_them(int(seconds)))
