"""python -m pacprune."""

from pacprune.cli import main

if __name__ == "__main__":
    main()
