"""The memory that weights are read from and written to."""
