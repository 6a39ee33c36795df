"""The tools of agents. A tool knows only its call, its run's folders and the link to the supervisor."""
