"""Configuration that people write, read strictly: retinue.yaml, SUBAGENT.md, skills and script files."""
