"""Strict settings for the whole suite: a leak of rank, key or dtype is an error, not a warning."""

import gc
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

pytest.register_assert_rewrite("published")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

gc.freeze()
gc.set_threshold(100_000, 20, 20)  # traces are many objects: looking for garbage is a tenth of all


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20_261_120)


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(7)


@pytest.fixture(autouse=True)
def torch_begins_anew():
    """Where a test compares with torch, its models have the same initial values every time."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(20_261_121)


@pytest.fixture(scope="module", autouse=True)
def own_programs():
    """A module's programs are its own, and leave the memory with it."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def quick_compilation():
    """For small arrays and many programs, where compiling costs more than running."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def usual_compilation():
    """For what XLA's optimisations may break, in a module that compiles quickly."""
    quick = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    if quick:
        jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", quick)
    if quick:
        jax.clear_caches()


SELDOM = (
    "test_masks.py::test_every_window_over_every_pair",
    "test_attention.py::TestBlockwise::test_runs_repeat_bit_for_bit[cap and sinks-dropout]",
    "test_attention.py::TestBlockwise::test_low_precision_is_no_worse_than_a_plain_implementation[f",
    "test_attention.py::TestBlockwise::test_low_precision_is_no_worse_than_a_plain_implementation[b"
    "float16-True]",
    "test_attention.py::TestBlockwise::test_vmap_over_any_argument_is_a_loop[('q",
    "test_attention.py::TestBlockwise::test_vmap_over_any_argument_is_a_loop[('v",
    "test_attention.py::TestBlockwise::test_many_rows_and_heads_each_have_their_own[rows apart]",
    "test_attention.py::TestBlockwise::test_heads_of_any_number_and_width_match_the_oracle[(8",
    "test_attention.py::test_blockwise_memory_grows_with_the_length_and_not_its_square[none",
    "test_attention.py::test_blockwise_memory_grows_with_the_length_and_not_its_square[causal-F",
    "test_kernels.py::test_a_device_of_a_users_own_shard_map_runs_its_part[plain]",
    "test_kernels.py::TestPlain::test_rematerialised",
    "test_kernels_tpu.py::TestTpu::test_blind_rows",
    "test_kernels_tpu.py::TestTpu::test_float32_stays",
    "test_kernels_tpu.py::TestTpu::test_any_length",
    "test_kernels_tpu.py::test_no_race_no_read_out_of_bounds_and_none_of_unwritten_memory[rows",
    "test_kernels_tpu.py::test_kernels_match_the_formulas[rows",
    "test_kernels_tpu.py::test_kernels_match_the_formulas[causal, one",
    "test_parity.py::test_cached_decode_matches_full_forward[encoder-decoder-sinusoidal",
    "test_parity.py::test_cached_decode_matches_full_forward[encoder-decoder-t5-MHA",
    "test_parity.py::test_cached_decode_matches_full_forward[decoder-none",
    "test_parity.py::test_cached_decode_matches_full_forward[decoder-learned",
    "test_training.py::test_ten_steps_and_ten_more_are_twenty_bit_for_bit[tied",
    "test_training.py::test_ten_steps_and_ten_more_are_twenty_bit_for_bit[untied",
    "test_models.py::test_loop_scan_and_remat_agree_with_dropout_on[encoder-decoder]",
    "test_models.py::test_initial_parameters_have_the_stated_spread[scan]",
    "test_models.py::test_branches_start_at_the_depth_of_their_own_stack[loop]",
    "test_models.py::test_padding_changes_nothing[learned]",
    "test_models.py::test_padding_changes_nothing[shaw]",
    "test_decode.py::test_one_program_serves_all_lengths",
    "test_generation.py::test_requests_add_no_program",
    "test_masks.py::test_random_compositions_mean",
    "test_parity.py::test_cached_decode_matches_full_forward[encoder-decoder-rope-MHA",
    "test_parity.py::test_cached_decode_matches_full_forward[encoder-decoder-alibi",
    "test_parity.py::test_cached_decode_matches_full_forward[decoder-shaw-MQA",
    "test_kernels.py::test_a_bias_that_is_not_mapped_has_a_gradient_for_each_mapped_call[1]",
    "test_kernels_tpu.py::TestTpu::test_scale_softcap_and_sinks",
    "test_kernels_tpu.py::test_kernels_match_the_formulas[every option",
    "test_kernels_tpu.py::test_kernels_match_the_formulas[softcap and",
    "test_kernels_tpu.py::test_four_chips",
    "test_attention.py::TestBlockwise::test_rematerialised",
    "test_decode.py::test_a_target_is_generated_from_its_source[scan]",
    "test_decode.py::test_generation_is_clean_under[leaks]",
    "test_decode.py::test_past_the_end_under_trace",
    "test_training.py::test_ten_steps_and_ten_more_are_twenty_bit_for_bit[bfloat16",
    "test_training.py::test_ten_steps_and_ten_more_are_twenty_bit_for_bit[warm",
    "test_training.py::test_ten_steps_and_ten_more_are_twenty_bit_for_bit[dropout]",
    "test_models.py::test_padding_is_not_cached[learned-None]",
    "test_streaming.py::test_a_decoder_fed_in_chunks_equals_the_whole_pass[False]",
    "test_streaming.py::test_a_decoder_too_ends_by_name",
    "test_cache_memory.py::test_what_was_taken_back_was_never_read[ring-scan]",
    "test_cache_memory.py::test_a_donated_cache_is_written_where_it_lies[encoder-decoder-True",
    "test_models.py::test_packed_documents_equal_separate_ones[sinusoidal]",
    "test_models.py::test_packed_documents_equal_separate_ones[alibi]",
    "test_models.py::test_padding_is_not_cached[shaw",
    "test_models.py::test_rows_are_independent[shaw]",
    "test_kernels_tpu.py::TestTpu::test_every_mask_matches_the_oracle[window]",
    "test_kernels_tpu.py::test_memory_is_linear_in_the_length[forward]",
    "test_attention.py::TestXla::test_any_length_matches_the_oracle[2x129]",
    "test_attention.py::TestXla::test_any_length_matches_the_oracle[3x127]",
    "test_attention.py::TestXla::test_any_length_matches_the_oracle[7x65]",
    "test_attention.py::TestXla::test_any_length_matches_the_oracle[64x17]",
    "test_attention.py::TestXla::test_any_length_matches_the_oracle[127x3]",
    "test_attention.py::TestBlockwise::test_any_length_matches_the_oracle[2x129]",
    "test_attention.py::TestBlockwise::test_any_length_matches_the_oracle[3x127]",
    "test_attention.py::TestBlockwise::test_any_length_matches_the_oracle[7x65]",
    "test_attention.py::TestBlockwise::test_any_length_matches_the_oracle[64x17]",
    "test_attention.py::TestBlockwise::test_any_length_matches_the_oracle[127x3]",
    "test_attention.py::TestBlockwise::test_array_bias_of_any_broadcast_shape_and_its_gradient[_N_S]",
    "test_attention.py::TestBlockwise::test_scores_of_a_hundred_thousand_are_finite_and_right[b",
    "test_attention.py::TestBlockwise::test_a_poisoned_key_that_all_see_passes_no_gradient_on[32",
    "test_parity.py::test_beams_and_forks_match_the_full_forward[encoder-decoder-shaw",
    "test_parity.py::test_cached_decode_matches_full_forward[encoder-decoder-t5-GQA",
    "test_completion.py::test_look_up_makes_room_in_a_ring[of two layers, one whole]",
    "test_published_cli.py::test_an_encoder_decoder_writes",
    "test_published_cli.py::test_a_published_decoder_continues",
    "test_published_cli.py::test_a_fine_tuned_run_begins",
    "test_published_cli.py::test_a_run_without_biases",
    "test_attention.py::test_blockwise_memory_grows_with_the_length_and_not_its_square[dropout",
    "test_attention.py::test_blockwise_memory_grows_with_the_length_and_not_its_square[alibi",
    "test_attention.py::TestBlockwise::test_a_poisoned_key_that_all_see_passes_no_gradient_on[64-128",
    "test_attention.py::TestBlockwise::test_many_rows_and_heads_each_have_their_own[rows together, "
    "masks of heads",
    "test_attention.py::TestBlockwise::test_every_mask_matches_the_oracle[dense]",
    "test_attention.py::TestBlockwise::test_array_bias_of_any_broadcast_shape_and_its_gradient[BNTS",
    "test_attention.py::TestBlockwise::test_heads_of_any_number_and_width_match_the_oracle[(4",
    "test_kernels.py::TestPlain::test_vmap_over_any_argument_is_a_loop[('query'",
    "test_kernels.py::TestPlain::test_vmap_over_any_argument_is_a_loop[('valid'",
    "test_kernels_tpu.py::test_rows_that_met_something_not_finite_are_marked[inf-key",
    "test_kernels_tpu.py::test_rows_that_met_something_not_finite_are_marked[inf-query",
    "test_kernels_tpu.py::test_rows_that_met_something_not_finite_are_marked[nan-value",
    "test_kernels_tpu.py::test_every_option_compiles_for_a_tpu[gradient_queries-v6e",
    "test_kernels_tpu.py::test_kernels_match_the_formulas[bias",
    "test_attention_weights.py::test_weights_of_generated_tokens_are_rows_of_the_whole_text[pair",
    "test_slots.py::test_each_request_gets_what_it_gets_alone[rope-sampled",
    "test_cache_memory.py::test_chunks_may_have_any_size[pattern",
    "test_cache_memory.py::test_chunks_may_have_any_size[int8",
    "test_cache_memory.py::test_rings_with_sinks_decode_as_the_full_pass[learned",
    "test_cache_memory.py::test_rings_with_sinks_decode_as_the_full_pass[t5",
    "test_sampling.py::test_a_nan_anywhere_poisons_at_every_length[1009",
    "test_streaming.py::test_an_encoder_fed_in_chunks_equals_the_whole_pass[shaw",
    "test_streaming.py::test_a_layer_fed_in_chunks_of_any_size_equals_the_formula[capped",
    "test_masks.py::test_no_tile_of_a_plain_mask_is_partial_without_need[blocks0",
    "test_speculative.py::test_greedy_tokens_are_those_of_generate_whatever_is_proposed[ring",
)
"""Compiles much, and has a neighbour that runs every time."""


def pytest_collection_modifyitems(items):
    """A class with `every_time` runs these tests of its suite; the others are `slow`, as is what
    stands in SELDOM. What a class names in `known` fails, with the reason."""
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(SELDOM):
            item.add_marker("slow")
        known = getattr(item.cls, "known", {}).get(item.name)
        if known is not None:
            item.add_marker(pytest.mark.xfail(reason=known, strict=True))
        chosen = getattr(item.cls, "every_time", None)
        seldom = item.name in getattr(item.cls, "seldom", ())
        if seldom or (chosen is not None and not {item.name, item.originalname} & chosen):
            item.add_marker("slow")
