"""Remote runs: the port, the validator of peers' reports, and the adapters."""
