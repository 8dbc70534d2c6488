"""How fast the library is, and how often its bounds fail."""
