"""Certificates: issued, saved, checked."""
