"""python -m pacprune."""

from pacprune.cli import main

main()
