"""What is around the kernels: masks as vectors, lists of tiles, padding, gradients, `vmap`, meshes.

The whole suite of attention runs here on a backend in dense arrays, so that what fails here is not
a kernel's fault; the kernels themselves are in test_kernels_tpu.py and test_kernels_hopper.py.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("attention_suite", "tolerances")

from attention_suite import AttentionSuite  # noqa: E402
from plain_kernels import Plain  # noqa: E402


class TestPlain(AttentionSuite):
    implementation = "pallas"
    target = Plain()
    may_refuse = True
    queries, span = 39, 71
