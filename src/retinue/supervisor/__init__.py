"""The supervisor: spawns, drives, limits and ends the runs of each tree. The only writer of the log."""
