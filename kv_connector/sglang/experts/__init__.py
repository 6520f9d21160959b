"""SGLang's expert exchange over kv-connector, enabled by ``KV_CONNECTOR_MOE=1``.

With ``--moe-a2a-backend flashinfer`` each rank has its own tokens, and each layer has an object that sends
them to the ranks of their experts. A hook gives SGLang an object of this package instead. Decode steps go
over kv_connector/moe. Prefill and large steps take SGLang's all-gather and reduce-scatter.

All ranks must take a step, or none. Each decision therefore rests on facts that all ranks know alike: the
configuration, the layers, which all ranks compare when the model is made, and the tokens of each rank.
"""
