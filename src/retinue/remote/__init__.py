"""Remote runs: the port, the validator of what peers report, and the adapters."""
