"""Measurements as ratios against a reference run in the same process. `python -m bench` prints them all."""
