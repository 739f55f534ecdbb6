"""Few queries of several heads, packed as rows of one tile: around kernels in dense arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_suite import AttentionSuite
from tests.support.plain_kernels import Packing

pytestmark = pytest.mark.usefixtures("quick_compilation")


class TestPacking(AttentionSuite):
    implementation = "pallas"
    target = Packing()
    may_refuse = True
    queries, span = 29, 71
