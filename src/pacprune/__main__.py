"""python -m pacprune."""

from pacprune.cli.app import main

if __name__ == "__main__":
    main()
