"""The tools of agents. A tool knows its call, its run's folders and the link to the supervisor, and nothing else."""
