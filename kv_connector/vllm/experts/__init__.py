"""vLLM's expert exchange over kv-connector, enabled by ``KV_CONNECTOR_MOE=1``.

vLLM sends tokens to the ranks of their experts by an all-gather, and sums the results by a reduce-scatter. A
subclass of its manager takes the place of the class and sends each token only to the ranks that own one of
its experts (kv_connector/moe). It leaves a call to vLLM if it cannot take the call.

All ranks must take a call, or none: a rank that runs vLLM's collective waits for all others. Each decision
therefore rests on facts that all ranks know alike: the configuration, the sizes that vLLM exchanged before
the step, element types, and row sizes. The number of rows on one rank is no such fact. Facts that only one
rank knows are exchanged once, before the first call that depends on them.
"""
