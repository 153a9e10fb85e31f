"""A Dask scheduler imports little to unpickle a run's tasks."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import pickle, sys
for task in {tasks}:
    pickle.loads(task)
assert not [name for name in ("torch", "idletrain.worker.attempt") if name in sys.modules]
"""


def test_to_unpickle_a_task_imports_no_torch() -> None:
    program = "import pickle, sys; from idletrain.worker import tasks as task; "
    program += "print([pickle.dumps(task.describe), pickle.dumps(task.train_subnet)])"
    tasks = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run([sys.executable, "-c", PROGRAM.format(tasks=tasks)], check=True)
