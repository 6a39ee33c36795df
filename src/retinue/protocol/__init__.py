"""Pure shapes shared by both ends of a wire. No I/O."""
