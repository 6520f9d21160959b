"""`kv-connector bench pd`: one vLLM engine alone beside P/D pairs through several connectors, in one run."""
