"""Runs from the command line: options, run folders, the demo, figures and the report."""
