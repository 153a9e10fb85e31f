"""`python -m idletrain` is `idletrain`, and both forget the working directory before they import anything else.

Python looks for modules there first after `python -m`, and with an empty entry in PYTHONPATH: a `numpy.py` in a
directory that somebody sent would run in every command.
"""

import os
import sys


def main() -> None:
    """Run the command line, without modules of the working directory until a command asks for them."""
    try:
        here = {"", ".", os.getcwd()}  # noqa: PTH109 (pathlib may be a stranger's)
    except FileNotFoundError:  # it was removed
        here = {"", "."}
    sys.path[:] = [entry for entry in sys.path if entry not in here]
    try:
        from idletrain.cli.main import main as command_line

        command_line()
    except KeyboardInterrupt:  # while that is imported, or an error is printed
        sys.exit(130)


if __name__ == "__main__":
    main()
