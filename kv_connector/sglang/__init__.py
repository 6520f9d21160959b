"""The adapter for SGLang: prefill/decode disaggregation over our agent, as transfer backend ``write_imm``."""
