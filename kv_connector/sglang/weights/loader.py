"""The custom weight loader that SGLang's option ``--custom-weight-loader`` names.

SGLang calls it in each worker for ``update_weights_from_tensor``, in a pause that the controller has begun.
The request brings no tensors: they have landed in the worker's arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kv_connector.sglang.weights.worker import worker_of


def take(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Has the worker of this model apply the version that is named in place of a tensor.

    Does not raise: an exception would end SGLang's scheduler. The worker reports the result in messages.
    """
    for version, _ in named_tensors:
        worker_of(model).apply(version)
