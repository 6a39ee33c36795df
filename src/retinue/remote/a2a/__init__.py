"""The adapter of agents that are called over A2A. Importing its modules loads `a2a-sdk`."""
