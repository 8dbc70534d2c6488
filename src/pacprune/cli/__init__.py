"""Commands and their options."""

from pacprune.cli.app import main as main
