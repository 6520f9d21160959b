"""`kv-connector bench conversations`: load of conversations for the user's own endpoints."""
