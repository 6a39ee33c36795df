"""The adapter for agents called over A2A. Importing its modules loads `a2a-sdk`."""
