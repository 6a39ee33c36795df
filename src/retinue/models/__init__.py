"""Models behind the `Model` port. An adapter knows one provider and nothing of runs, logs or budgets."""
