"""`kv-connector bench pd`: one vLLM engine alone beside pairs of prefill and decode engines through several
connectors."""
