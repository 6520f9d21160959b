"""New weights for SGLang's engines: the adapter of ``kv_connector.weights``."""
