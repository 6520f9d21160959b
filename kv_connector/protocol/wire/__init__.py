"""The messages between two workers, and the names in them: of prompts, prefixes and versions."""
