"""Checks from a model's config.json alone whether two engines fit each other, and what its prompts cost."""
