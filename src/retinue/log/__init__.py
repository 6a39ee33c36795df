"""The log and its folds: where events are kept, and what they add up to. Knows nothing of who writes or looks."""
