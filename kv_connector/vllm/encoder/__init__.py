"""Encoder disaggregation: one engine encodes pictures, and prefill engines receive the embeddings."""
