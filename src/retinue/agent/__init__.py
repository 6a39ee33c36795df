"""What a run does: the loop, how a profile becomes one, and agents that are a callable instead of a model."""
