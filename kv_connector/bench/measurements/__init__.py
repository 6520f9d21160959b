"""The measurements of `kv-connector bench`, each with its own subcommand."""
