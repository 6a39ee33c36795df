"""Copied workspaces: creating them, recording the run's changes, and applying the changes.

All functions block and run in threads. Nothing here runs a model or a tool. The files that a run left are read as data
through descriptors, never by git.
"""
