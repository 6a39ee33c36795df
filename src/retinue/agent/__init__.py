"""The agent loop, the life of a tool call, and the planner that turns a profile into a plan."""
