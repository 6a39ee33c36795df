"""Runs that live elsewhere, seen as runs of our tree."""
