"""The tree: who may spawn, run, wait, spend and when it all ends. The only writer of the log."""
