"""Become a program of a testbed's node: on its core, in its network namespace, if it has one.

python -m on_node CORE NAMESPACE MODULE [ARGUMENT...]
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from idletrain_testbed import processes

if __name__ == "__main__":
    core, namespace, module, *arguments = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    if namespace:
        processes.enter(Path(namespace))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
