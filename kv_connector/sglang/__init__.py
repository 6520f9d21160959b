"""The adapter for SGLang: prefill/decode disaggregation over the agent, as transfer backend ``write_imm``."""
