"""The pruning methods from end to end."""
