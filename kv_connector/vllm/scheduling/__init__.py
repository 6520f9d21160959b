"""The scheduler side of the connector, and the schedulers that extend vLLM's own."""
