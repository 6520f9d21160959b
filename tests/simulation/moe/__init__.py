"""A model of MoE dispatch and combine: every interleaving of small groups, under weakly ordered memory."""
