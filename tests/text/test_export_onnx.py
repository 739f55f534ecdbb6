"""The ONNX code in docs/export.md: onnxruntime writes the same tokens as `generate`."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.compilation import quick_environment

PAGE = Path(__file__).parents[2] / "docs" / "export.md"

COMPARED = """
import pathlib, tempfile
from tests.text.test_export import CONFIGS, NEW, PROMPTS, generated, made

config, params = made({name!r})
want = [generated(config, params, PROMPTS[:rows], 71) for rows in (1, 3)]  # before JAX is patched
assert len({{token for row in want[1] for token in row}}) > 5
for rows, expected in zip((1, 3), want):
    folder = pathlib.Path(tempfile.mkdtemp())
    export_onnx(folder, config, params, batch=rows, length=7, context=71)
    lengths = np.array([len(prompt) for prompt in PROMPTS[:rows]], np.int32)
    tokens = np.array([(prompt + [0] * 7)[:7] for prompt in PROMPTS[:rows]], np.int32)
    found = decode_onnx(folder, tokens, lengths, NEW).tolist()
    assert found == expected, (rows, found, expected)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_onnx_code_on_export_page_matches_generate(name):
    for needed in ("jax2onnx", "onnxruntime"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    (code,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code + COMPARED.format(name=name)], capture_output=True, text=True,
        timeout=280, env=quick_environment(), cwd=PAGE.parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("equal\n")
