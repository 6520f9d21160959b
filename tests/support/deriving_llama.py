"""A vLLM plugin: a Llama with vLLM's hook for values that a model derives from its weights."""

ARCHITECTURE = "DerivingLlamaForCausalLM"


def register() -> None:
    """Registers the model. vLLM calls this in each of its processes."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class DerivingLlama(LlamaForCausalLM):
        def process_weights_after_loading(self) -> None: ...

    ModelRegistry.register_model(ARCHITECTURE, DerivingLlama)
