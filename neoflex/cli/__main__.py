"""`python -m neoflex.cli` is the `neoflex` command."""

from neoflex.cli import main

main()
