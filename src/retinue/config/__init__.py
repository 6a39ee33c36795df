"""What people write down, read strictly: retinue.yaml, SUBAGENT.md, skills and script files. Knows only `core`."""
