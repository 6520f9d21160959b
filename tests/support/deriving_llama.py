"""A plugin of vLLM's with a Llama that has vLLM's hook for values which a model derives from its weights."""

ARCHITECTURE = "DerivingLlamaForCausalLM"


def register() -> None:
    """vLLM calls it in each of its processes."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class DerivingLlama(LlamaForCausalLM):
        def process_weights_after_loading(self) -> None: ...

    ModelRegistry.register_model(ARCHITECTURE, DerivingLlama)
