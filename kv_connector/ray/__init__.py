"""Ray Serve LLM: P and D as replicas that Ray places, starts and scales, each request at both at once."""
