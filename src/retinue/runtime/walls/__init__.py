"""What can stand between a run and the machine. A wall says how a worker is started behind it, and what holds."""
