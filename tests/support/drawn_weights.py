"""A vLLM plugin that draws the weights of --load-format dummy at the scale of a trained network.

vLLM's own dummy weights are so small that a model's tokens do not depend on its prompt. The plugin works for
every model class, because it draws the parameters that the class has made, quantized or not. Equal names and
shapes give equal weights in every engine.

The plugin also takes the first configuration of each Triton kernel. Otherwise each engine measures all of
them and chooses by itself, for minutes with some models. Engines that choose differently round differently.
"""

import zlib
from pathlib import Path
from typing import Any

SEED = 5
SCALE = 0.0625
"""Scale of quantized weights: a power of two, which every type of scale can hold."""


def register() -> None:
    """Replaces the drawing function of vLLM's dummy loader. vLLM calls this in each of its processes."""
    from triton.runtime.autotuner import Autotuner
    from vllm.model_executor.model_loader import dummy_loader

    usable = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, arguments: usable(self, arguments)[:1]

    names: dict[int, str] = {}
    original = dummy_loader.DummyModelLoader.load_weights

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        names.update((id(value), name) for name, value in model.named_parameters())
        names.update((id(value), name) for name, value in model.named_buffers())
        original(self, model, model_config)

    def draw(tensor: Any, *_: Any, name: str = "", **__: Any) -> None:
        draw_one(tensor, names.get(id(tensor), name))

    dummy_loader.DummyModelLoader.load_weights = load_weights
    dummy_loader.initialize_single_dummy_weight = draw


def draw_one(tensor: Any, name: str) -> None:
    """Fills a parameter in place: matrices by their inputs, norms with 1, scales with SCALE."""
    import torch

    kind = name.rpartition(".")[2]
    if kind == "tid2eid":  # DeepSeek-V4: the experts of each token, drawn by vLLM at the model's construction
        tokens = torch.arange(tensor.numel()).reshape(tensor.shape)
        _copy(tensor, tokens % (int(tensor.max()) + 1))
        return
    if not torch.is_floating_point(tensor) or tensor.numel() == 0:
        return
    if "scale" in kind and "global" not in kind and tensor.dtype.itemsize != 2:
        _copy(tensor, torch.full(tensor.shape, SCALE))
    elif kind == "A_log":
        _copy(tensor, torch.linspace(0.02, 1.0, tensor.numel()).log().reshape(tensor.shape))
    elif kind == "A":  # Mamba: vLLM keeps -exp(A_log)
        _copy(tensor, -torch.linspace(0.02, 1.0, tensor.numel()).reshape(tensor.shape))
    elif kind == "dt_bias":
        _copy(tensor, torch.full(tensor.shape, -1.97))  # softplus gives 0.13
    elif tensor.dim() < 2:
        _copy(tensor, torch.full(tensor.shape, 1.0 if kind == "weight" else 0.0))
    else:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + SEED)
        drawn = torch.empty(tensor.shape).normal_(generator=generator)
        if tensor.dtype.itemsize > 1 and "embed" not in name:
            drawn *= tensor.shape[-1] ** -0.5
        _copy(tensor, drawn)


def _copy(tensor: Any, values: Any) -> None:
    import torch

    with torch.no_grad():
        tensor.copy_(values.to(tensor.device).to(tensor.dtype))


def install(directory: Path) -> str:
    """Writes the metadata by which vLLM finds the plugin. Returns the additions to PYTHONPATH."""
    info = directory / f"{__name__}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {__name__}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{__name__} = {__name__}:register\n")
    return f"{directory}:{Path(__file__).parent}"
