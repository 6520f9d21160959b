"""integration/benchmarks/gpu_engines.py: the first error of a GPU server that did not start."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_engines import first_error

WARNING = """\
(APIServer pid=9) WARNING 11-30 10:05:30 [base.py:383]   File "base.py", line 220, in get_tokenizer
(APIServer pid=9) WARNING 11-30 10:05:30 [base.py:383] ValueError: Tokenizer not available when `skip_tokenizer_init=True`
INFO:     Application startup complete.
"""  # noqa: E501
ENGINE = """\
(EngineCore pid=7) ERROR 11-30 09:42:50 [core.py:1] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-30 09:42:50 [core.py:1]   File "/vllm/utils.py", line 941, in resolve
(EngineCore pid=7) ERROR 11-30 09:42:50 [core.py:1]     assert all(equal)
(EngineCore pid=7) ERROR 11-30 09:42:50 [core.py:1] AssertionError
Traceback (most recent call last):
  File "/vllm/utils.py", line 12, in main
RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (WARNING, ""),
        (WARNING + ENGINE, 'AssertionError (File "/vllm/utils.py", line 941, in resolve)'),
        (
            '  File "a.py", line 1, in b\ntorch.AcceleratorError: CUDA error',
            "torch.AcceleratorError: CUDA error ",
        ),
    ],
)
def test_first_error_is_the_cause_with_its_place(text: str, error: str, tmp_path: Path) -> None:
    log = tmp_path / "case-prefill.log"
    log.write_text(text)
    assert first_error(log).startswith(error) if error else first_error(log) == ""
