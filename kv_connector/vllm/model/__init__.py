"""The parts of vLLM's configuration, model and KV cache that the connector reads or refuses."""
