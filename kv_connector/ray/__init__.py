"""Ray Serve LLM: P and D as replicas that Ray places, starts and scales. Both get each request at once."""
