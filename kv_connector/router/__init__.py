"""A small router for disaggregated prefill: OpenAI's routes in front of prefill and decode engines."""
