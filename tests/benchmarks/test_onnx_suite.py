"""ONNX's attention cases, run by `benchmarks.conformance.onnx_suite`."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.conformance import onnx_suite
from transformer_jax import Causal, dot_product_attention

pytest.importorskip("onnx", minversion="1.23")


@functools.cache
def cases():
    return {case.name: case for case in onnx_suite.suite()}


@pytest.mark.slow
def test_suite_includes_all_cases_for_three_operators():
    operators = [case.operator for case in cases().values()]
    counts = {name: operators.count(name) for name in onnx_suite.OPERATORS}
    assert counts["Attention"] >= 93
    assert counts["FlexAttention"] >= 11 and counts["LinearAttention"] >= 14


@pytest.mark.slow
@pytest.mark.parametrize("implementation", onnx_suite.IMPLEMENTATIONS)
def test_every_case_matches_or_is_marked_inexpressible(implementation):
    """Run every sixth case; the command runs all."""
    first = list(onnx_suite.IMPLEMENTATIONS).index(implementation)
    for case in list(cases().values())[first::6]:
        cell = onnx_suite.judge(implementation, case)
        lacks = case.operator == "LinearAttention" and implementation != "xla"
        odd = case.inputs["Q"].dtype == np.float16 or case.heads("V").shape[-1] % 8
        refused = implementation.startswith("tpu") and odd
        expected = "inexpressible" if lacks else "refused" if refused else "equal"
        assert cell.kind == expected, cell


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "difference"),
    [
        ("test_attention_4d_causal", {"mask": None}, "Y is off by"),
        ("test_attention_4d_softcap", {"softcap": None}, "Y is off by"),
        ("test_attention_4d_with_qk_matmul", {"scale": 1.0}, "off by"),
        ("test_attention_4d_causal_nonpad_continued_prefill", {"q_positions": None}, "Y is off by"),
        ("test_attention_23_boolmask_fullymasked_row_nan_robustness", {"bias": None}, "Y is off"),
    ],
)
def test_suite_detects_wrong_argument(name, change, difference, monkeypatch):
    monkeypatch.setattr(
        onnx_suite,
        "dot_product_attention",
        lambda *arrays, **options: dot_product_attention(*arrays, **options | change),
    )
    cell = onnx_suite.judge("xla", cases()[name])
    assert cell.kind == "wrong" and difference in cell.text


def test_every_case_of_linear_attention_matches():
    linear = [case for case in cases().values() if case.operator == "LinearAttention"]
    assert len(linear) >= 14
    for case in linear:
        cell = onnx_suite.judge("xla", case)
        assert cell.kind == "equal", cell


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "difference"),
    [
        ("test_linear_attention_explicit_scale", {"scale": None}, "Y is off by"),
        ("test_linear_attention_decode_step", {"initial_state": None}, "Y is off by"),
    ],
)
def test_suite_detects_wrong_argument_of_linear_attention(name, change, difference, monkeypatch):
    rule = onnx_suite.RULES["gated_delta"]
    wrong = lambda *arrays, **options: rule(*arrays, **options | change)  # noqa: E731
    monkeypatch.setitem(onnx_suite.RULES, "gated_delta", wrong)
    cell = onnx_suite.judge("xla", cases()[name])
    assert cell.kind == "wrong" and difference in cell.text


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, 2], ids=["Q", "K", "V"])
def test_suite_detects_wrong_gradient(at, monkeypatch):
    def without_a_gradient(*arrays, **options):
        arrays = list(arrays)
        # the value is unchanged, and the gradient is 1 % too small
        arrays[at] = 0.99 * arrays[at] + 0.01 * jnp.asarray(np.asarray(fixed[at]))
        return dot_product_attention(*arrays, **options)

    case = cases()["test_attention_4d_causal"]
    fixed = [case.heads(name) for name in "QKV"]
    monkeypatch.setattr(onnx_suite, "dot_product_attention", without_a_gradient)
    cell = onnx_suite.judge("xla", case)
    assert cell.kind == "wrong" and f"gradient of {'QKV'[at]} is off by" in cell.text


@pytest.mark.slow
def test_options_depend_on_cache_and_lengths():
    options, past = onnx_suite.options(cases()["test_attention_4d_causal_with_past_and_present"])
    assert past == 3 and isinstance(options["mask"], Causal)
    assert options["q_positions"].tolist() == [[3, 4, 5, 6]] * 2
    case = cases()["test_attention_4d_causal_nonpad_batch_prefill"]
    options, past = onnx_suite.options(case)
    lengths = case.inputs["nonpad_kv_seqlen"]
    assert past == 0 and options["q_positions"][:, -1].tolist() == (lengths - 1).tolist()
