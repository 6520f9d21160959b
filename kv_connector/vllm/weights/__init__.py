"""Weights for vLLM: the transfer backend ``write_imm``, its controller and the trainer's side."""
