"""kv-connector config: what is wrong with a deployment's settings, before anything starts."""
