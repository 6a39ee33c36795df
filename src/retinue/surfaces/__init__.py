"""Doors for people and programs: they read views and send commands, and know nothing of each other."""
