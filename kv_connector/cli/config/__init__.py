"""kv-connector config: checks a deployment's settings before anything starts."""
