"""The version, where every module can read it, also from a source tree that was never installed."""

__version__ = "0.1.0"
