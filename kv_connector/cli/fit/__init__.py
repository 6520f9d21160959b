"""Whether two engines of one model fit each other, what its prompts cost, from its config.json alone."""
