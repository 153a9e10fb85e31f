"""`python -m idletrain` is `idletrain`."""

from idletrain.cli.main import main

main()
