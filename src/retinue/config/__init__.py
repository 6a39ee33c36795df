"""Strict readers of the configuration that people write: retinue.yaml, SUBAGENT.md, skills and script files."""
