"""A framework that is not installed is missed by name, with what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, *_):
        if name == {framework!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import psstore.integrations.{module}
"""


@pytest.mark.parametrize(
    ("module", "framework"), [("lightning", "lightning"), ("huggingface", "transformers"), ("vllm", "vllm")]
)
def test_what_is_not_installed_is_named_with_what_to_install(module: str, framework: str) -> None:
    program = PROGRAM.format(framework=framework, module=module)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"psstore.integrations.{module} needs" in run.stderr
    assert f"pip install {framework}" in run.stderr
