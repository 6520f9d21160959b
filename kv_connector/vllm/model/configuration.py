"""vLLM's configuration: the parts that the connector refuses, and the facts that it reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from kv_connector.protocol.pages.refused_divisions import division_problem
from kv_connector.vllm.internals import VLLM_VERSION, release
from kv_connector.vllm.model.kv_specs import SUPPORTED_SPECS, spec_problem, unproven
from kv_connector.vllm.model.model_facts import layer_spec

logger = logging.getLogger(__name__)

# Must be the value of the entry point in pyproject.toml.
FORCED_TOKEN = "kv_connector.vllm.forced_token:ForcedToken"


class UnsupportedConfiguration(ValueError):
    """The connector cannot serve this configuration of vLLM. The message says what to change."""


def check_configuration(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises UnsupportedConfiguration for caches that this release cannot transfer correctly."""
    if vllm_config.model_config.enable_sleep_mode and not release.FOLLOWS_SLEEP:
        raise UnsupportedConfiguration(
            f"WriteImmConnector does not support --enable-sleep-mode with vLLM {VLLM_VERSION}, which does "
            "not notify connectors when it unmaps the KV cache. Install vllm==0.33.*, or remove "
            "--enable-sleep-mode."
        )
    parallel = vllm_config.parallel_config
    problem = division_problem(
        parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size, parallel.use_ubatching
    )
    if problem is not None:
        raise UnsupportedConfiguration(problem)
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        problem = _group_problem(group)
        if problem is not None:
            model = ", ".join(vllm_config.model_config.architectures)
            specs = ", ".join(spec.__name__ for spec in SUPPORTED_SPECS)
            raise UnsupportedConfiguration(
                f"WriteImmConnector cannot transfer KV cache group {index} of {model}: {problem}. It "
                f"supports {specs}; docs/models.md lists the models."
            )
    _warn_of_unproven(kv_cache_config)


def _warn_of_unproven(kv_cache_config: Any) -> None:
    layers = [
        f"{name} ({type(spec).__name__}, tokens_per_state {getattr(spec, 'tokens_per_state', 1)})"
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
        if unproven(spec := layer_spec(group, name))
    ]
    if layers:
        logger.warning(
            "no run has shown right answers with the KV cache of %d layers, such as %s. Compare the model's "
            "answers with those of one engine (kv-connector verify) before you serve it",
            len(layers),
            layers[0],
        )


def _group_problem(group: Any) -> str | None:
    """Returns why a KV cache group is refused, with the name of its first layer that is, or None."""
    if group.host_resident:
        return "its pages are in host memory. Leave HiSparse out"
    if not group.enable_kv_transfer:
        return "vLLM excludes its pages from transfers. Leave HiSparse out"
    for name in group.layer_names:
        problem = spec_problem(layer_spec(group, name))
        if problem is not None:
            return f"layer {name} has {problem}"
    return None


def configured_connectors(vllm_config: Any) -> list[tuple[str, str]]:
    """Returns name and role of each configured KV connector, also of those within a MultiConnector."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return []
    own = [(str(transfer.kv_connector), str(transfer.kv_role))]
    return own + _connectors_of(transfer.kv_connector_extra_config)


def _connectors_of(extra: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for child in extra.get("connectors", ()):
        found.append((str(child.get("kv_connector")), str(child.get("kv_role"))))
        found += _connectors_of(child.get("kv_connector_extra_config", {}))
    return found


def forces_tokens(vllm_config: Any) -> bool:
    """Returns whether this engine can go on with a token that another engine sampled.

    vLLM takes logits processors from plugins only without speculative decoding. The plugin may be missing
    although the connector is found: through kv_connector_module_path, or in an installation that is older
    than the plugin. A warning then reports it.
    """
    if vllm_config.speculative_config is not None:
        return False
    plugins = entry_points(group="vllm.logits_processors")
    if any(plugin.value == FORCED_TOKEN for plugin in plugins):
        return True
    logger.warning(
        "no early first tokens: the entry point %s is not installed. Reinstall kv-connector with pip",
        FORCED_TOKEN,
    )
    return False
