"""The messages about weights, and the thread and the connections that carry them."""
