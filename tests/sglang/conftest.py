"""Tests against SGLang itself: `make test-sglang`, in an environment of its own. Where there is no SGLang, as
in the one that vLLM lives in, none of them is collected."""

from __future__ import annotations

import importlib.util

# Not "sglang": this folder is called so, too.
collect_ignore_glob = [] if importlib.util.find_spec("sglang.srt") else ["*.py"]
