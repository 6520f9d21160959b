"""kv-connector: KV-cache pages pushed layer by layer from prefill engines into decode engines."""

__version__ = "0.1.0"
