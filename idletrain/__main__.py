"""`python -m idletrain` is `idletrain`."""

from idletrain.cli import main

main()
