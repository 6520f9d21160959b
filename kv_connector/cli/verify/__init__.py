"""kv-connector verify: canary prompts to a deployment, compared with a reference engine's answers."""
