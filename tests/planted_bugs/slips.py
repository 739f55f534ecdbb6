"""Realistic bugs of one line each, with the default tests that catch them.

If a change of the code removes the old text of a slip, adapt the slip to the new code, or write
a similar one.
"""

from __future__ import annotations

from typing import NamedTuple


class Slip(NamedTuple):
    """Bug that replaces `old`, which occurs once in the file, with `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest."""


def of(file: str, *slips: tuple[str, str, str, str]) -> tuple[Slip, ...]:
    """Return the slips of one file; each is a tuple of name, old text, new text and tests."""
    return tuple(
        Slip(name, file, old, new, tuple(f"tests/{test}" for test in tests.split()))
        for name, old, new, tests in slips
    )


SLIPS: tuple[Slip, ...] = (
    *of(
        "transformer_jax/models/experts.py",
        (
            "sigmoid weights are not normalized",
            "        if experts.normalize:",
            "        if experts.normalize and bias is None:",
            "models/test_experts.py::test_expert_outputs_and_gradients_match_float64",
        ),
        (
            "an expert's rows start one block late",
            "begin = (ends + sizes // -block)[chosen[order]]",
            "begin = (ends + sizes // -block)[chosen[order]] + 1",
            "models/test_experts.py::test_rows_reach_assigned_expert_for_any_distribution",
        ),
        (
            "the expert balance counts padding",
            "            share = valid.astype(F32) / jnp.maximum(valid.sum(), 1)",
            "            share = jnp.ones_like(valid, F32) / valid.size",
            "models/test_experts.py::test_router_losses_match_formulas",
        ),
    ),
    *of(
        "kernels/sharding.py",
        (
            "all calls of a vmap share single-row arrays",
            "return x is pairs or B > 1",
            "return True",
            "kernels/test_gradient.py::test_vmap_over_single_row_uses_one_kernel_row_per_call",
        ),
    ),
    *of(
        "kernels/contract.py",
        (
            "a padded list repeats the wrong tile",
            "xp.minimum(steps, xp.maximum(seen - 1, 0)[..., None])",
            "xp.minimum(steps, seen[..., None])",
            "kernels/test_tile_lists.py::test_tile_list_is_padded_with_last_tile",
        ),
    ),
    *of(
        "kernels/derivatives.py",
        (
            "the gradient's tangents omit the known values",
            "        parts.append(_along(lambda xs: compute(*xs), arrays, changed))",
            "        parts += [] if parts else [_along(lambda xs: compute(*xs), arrays, changed)]",
            "kernels/test_derivatives.py::test_gradients_use_fused_backward_pass_and_other_derivatives_plain_code",
        ),
        (
            "the wrong gradients are reported as needed",
            "[i in moved for i in range(count)]",
            "[i not in moved for i in range(count)]",
            "kernels/test_derivatives.py::test_backward_pass_computes_only_requested_gradients",
        ),
    ),
    *of(
        "kernels/dropout.py",
        (
            "dropout drops the same weights in every row and head",
            "return _absorb(a, b, jnp.arange(B * N, dtype=jnp.uint32).reshape(B, N))",
            "return _absorb(a, b, jnp.zeros((B, N), jnp.uint32))",
            "attention/test_attention.py::TestXla::test_dropout_matches_rate_and_preserves_mean "
            "attention/test_attention.py::TestXla::test_all_options_combined_match_reference",
        ),
    ),
    *of(
        "kernels/sharding.py",
        (
            "mesh axes are reordered",
            "axes[name] = tuple(_axes(splitting))",
            "axes[name] = tuple(sorted(_axes(splitting)))",
            "multi_device/test_meshes.py::test_results_on_four_devices_match_one_device[some]",
        ),
    ),
    *of(
        "kernels/tpu/visits.py",
        (
            "an empty row of tiles is neither visited nor written",
            "counts = xp.maximum(seen, (line % heads == 0)[..., 0].astype(np.int32))",
            "counts = seen",
            "kernels/test_visits.py::test_every_listed_tile_is_visited_once_in_order",
        ),
        (
            "a visit at the end of a row is assigned to that row",
            'side="right", method=search',
            'side="left", method=search',
            "kernels/test_visits.py::test_every_listed_tile_is_visited_once_in_order",
        ),
    ),
    *of(
        "transformer_jax/attention/additive.py",
        (
            "additive attention ignores its mask",
            "result = softmax(scores[:, None], visible, nonfinite)",
            "result = softmax(scores[:, None], None, nonfinite)",
            "lectures/test_recurrent.py::test_source_padding_does_not_affect_output",
        ),
    ),
    *of(
        "transformer_jax/attention/biases.py",
        (
            "head counts that aren't powers of two use the even slopes",
            "for n in range(1, 2 * (num_heads - power), 2)]",
            "for n in range(2, 2 * (num_heads - power) + 1, 2)]",
            "models/test_positions.py::test_alibi_slopes_match_paper",
        ),
        (
            "distance 0 falls into the buckets after the query",
            "jnp.where(distance > 0, b, 0) if",
            "jnp.where(distance >= 0, b, 0) if",
            "models/test_positions.py::test_relative_position_buckets_match_t5",
        ),
    ),
    *of(
        "transformer_jax/attention/blockwise/core.py",
        (
            "the gradient of a capped, biased score ignores the mask",
            "(call.bias is None or t is not None)",
            "call.bias is None",
            "attention/test_attention.py::test_overflow_in_masked_keys_does_not_affect_gradients",
        ),
        (
            "the softcap's slope is 1 - t instead of 1 - t^2",
            "ds = ds * (1 - t * t)",
            "ds = ds * (1 - t)",
            "attention/test_attention.py::test_overflow_in_masked_keys_does_not_affect_gradients",
        ),
        (
            "the backward pass omits log l from the weights",
            "p = _exp(s - of.row_max - of.log_sum)",
            "p = _exp(s - of.row_max)",
            "attention/test_attention.py::test_overflow_in_masked_keys_does_not_affect_gradients",
        ),
    ),
    *of(
        "kernels/program.py",
        (
            "a causal tile counts as full if only its last query sees all keys",
            "ends = [(x_high, y_low), (x_low, y_high)]",
            "ends = [(x_high, y_high), (x_low, y_high)]",
            "attention/test_masks.py::test_union_tile_is_full_if_either_mask_tile_is_full",
        ),
    ),
    *of(
        "transformer_jax/attention/mask.py",
        (
            "a negated mask reveals empty slots",
            "return self.allows(jnp.asarray(q), jnp.asarray(k)) & (k >= 0)[:, None, None, :]",
            "return self.allows(jnp.asarray(q), jnp.asarray(k))",
            "attention/test_masks.py::test_empty_slot_stays_masked_under_negation",
        ),
    ),
    *of(
        "transformer_jax/attention/masks.py",
        (
            "a window of one skips its own tile",
            "self.left + self.right < 2",
            "self.left + self.right <= 2",
            "attention/test_masks.py::test_window_size_includes_query_itself",
        ),
        (
            "a window excludes the query itself",
            "q - k <= min(self.left - 1, INT32.max)",
            "q - k <= min(self.left, INT32.max)",
            "attention/test_masks.py::test_window_size_includes_query_itself",
        ),
        (
            "a missing segment ID counts as another document",
            "(q_ids == k_ids) & q_inside & k_inside",
            "(q_ids == k_ids) & q_inside",
            "attention/test_masks.py::test_segment_ids_may_be_shorter_than_queries_or_keys",
        ),
    ),
    *of(
        "transformer_jax/attention/reference.py",
        (
            "a nonfinite key affects query heads of another group",
            "bad_heads = jnp.repeat(~good_key.all(axis=1), group, axis=1)",
            "bad_heads = jnp.tile(~good_key.all(axis=1), (1, group))",
            "attention/test_attention.py::test_nonfinite_unmasked_key_affects_query_heads_in_its_group",
        ),
        (
            "position 0 counts as an empty slot",
            "used = (k >= 0)[",
            "used = (k > 0)[",
            "attention/test_attention.py::TestXla::test_masked_keys_and_values_have_no_influence",
        ),
        (
            "a sink does not update the row's maximum",
            "row_max = jnp.maximum(row_max, jax.lax.stop_gradient(sink))",
            "row_max = jnp.maximum(row_max, 0 * jax.lax.stop_gradient(sink))",
            "attention/test_attention.py::TestXla::test_all_options_combined_match_reference",
        ),
    ),
    *of(
        "transformer_jax/cache/kv_cache.py",
        (
            "a ring with sinks wraps at its full length",
            "sinks + (positions - sinks) % ring",
            "sinks + positions % ring",
            "cache/test_kv_cache.py::test_ring_cache_keeps_newest_positions",
        ),
        (
            "a ring claims one key more than it stores",
            "at_most(window + k.shape[1] - 1, cache.capacity - cache.sinks)",
            "at_most(window + k.shape[1] - 2, cache.capacity - cache.sinks)",
            "cache/test_kv_cache.py::test_first_query_in_chunk_attends_to_its_full_window",
        ),
        (
            "a repeated token is stored twice",
            "slot_leaves(replace(cache, positions=places)),",
            "slot_leaves(cache),",
            "cache/test_kv_cache.py::test_repeated_position_replaces_its_old_key",
        ),
        (
            "rewinding keeps the token at the new length",
            "jnp.where(cache.positions < length[:, None], cache.positions, -1)",
            "jnp.where(cache.positions <= length[:, None], cache.positions, -1)",
            "cache/test_cache_memory.py::test_rewind_keeps_exactly_positions_below_length",
        ),
        (
            "int8 overflows at the largest value",
            "largest(jnp.abs(x)) / 127, jnp.finfo",
            "largest(jnp.abs(x)) / 128, jnp.finfo",
            "cache/test_cache_memory.py::test_cache_quantization_error_is_at_most_half_a_step",
        ),
    ),
    *of(
        "transformer_jax/cache/model_cache.py",
        (
            "a ring with room only for its sinks is reported as never filling",
            "return slots, slots >= least",
            "return slots, slots >= window",
            "cache/test_cache_memory.py::test_full_attention_layer_limits_positions_of_ring_caches "
            "cache/test_cache_memory.py::test_each_layer_allocates_only_required_slots "
            "cache/test_cache_memory.py::test_cache_with_different_window_pattern_is_rejected",
        ),
        (
            "a ring in a layer pattern has no slack",
            "min(capacity, least + slack)",
            "min(capacity, least)",
            "cache/test_cache_memory.py::test_each_layer_allocates_only_required_slots",
        ),
    ),
    *of(
        "transformer_jax/cache/paged_cache.py",
        (
            "a full page is allocated again",
            "(cache.length // size)[:, None]\n    touched",
            "((cache.length - 1) // size)[:, None]\n    touched",
            "cache/test_paged_cache.py::test_page_count_needed_matches_allocation_with_shared_rows",
        ),
        (
            "an exhausted row stays exhausted after a rewind",
            "exhausted &= (length >= old_length) & (length > 0)",
            "exhausted &= length >= old_length",
            "cache/test_paged_cache.py::test_exhausted_row_continues_after_rewind_to_zero",
        ),
        (
            "an unassigned block counts as owned",
            "unshared = (table >= 0) & (_references(cache)[table] == 1)",
            "unshared = _references(cache)[table] == 1",
            "cache/test_paged_cache.py::test_page_count_needed_is_correct_without_free_pages",
        ),
        (
            "a row copies its own page before a write",
            "(references[cache.block_table] > 1))",
            "(references[cache.block_table] >= 1))",
            "cache/test_paged_cache.py::test_row_writes_to_unshared_pages_in_place",
        ),
        (
            "rewound tokens reappear with the next token",
            "jnp.where(kept < cache.length[:, None, None], kept, -1)",
            "jnp.where(kept < cache.length.max(), kept, -1)",
            "cache/test_paged_cache.py::test_rewound_tokens_stay_discarded_despite_longer_row",
        ),
        (
            "a full page keeps its successor",
            "blocks = -(-length // cache.page_size)\n",
            "blocks = length // cache.page_size + 1\n",
            "cache/test_paged_cache.py::test_random_paged_cache_operations_match_dictionary_model",
        ),
    ),
    *of(
        "transformer_jax/checkpoints/checkpoint.py",
        (
            "a save keeps a reference to the caller's array",
            "array = value if isinstance(value, jax.Array) else np.array(value)",
            "array = value if isinstance(value, jax.Array) else np.asarray(value)",
            "checkpoints/test_checkpoint.py::test_save_captures_values_at_call_time",
        ),
        (
            "the best checkpoint is deleted with the old ones",
            "        if step != best:\n",
            "        if step:\n",
            "checkpoints/test_run_folder.py::"
            "test_checkpoints_are_found_pruned_and_set_aside_by_step",
        ),
    ),
    *of(
        "transformer_jax/cli/flags.py",
        (
            "any nonempty string parses as true",
            'return text.lower() == "true"',
            "return bool(text)",
            "cli/test_flags.py::test_every_displayed_run_field_parses_to_original_value",
        ),
    ),
    *of(
        "transformer_jax/cli/plot.py",
        (
            "each line's time starts at the beginning of the run",
            'seconds += (line["step"] - last) * self.tokens_per_step / rate',
            'seconds += line["step"] * self.tokens_per_step / rate',
            "cli/test_plot.py::test_horizontal_axis_shows_steps_tokens_or_hours",
        ),
    ),
    *of(
        "transformer_jax/cli/report.py",
        (
            "bits are nats times log 2 instead of divided by it",
            "bits = nats / math.log(2)",
            "bits = nats * math.log(2)",
            "cli/test_train.py::test_training_report_states_loss_unit",
        ),
    ),
    *of(
        "transformer_jax/config/lora.py",
        (
            "rsLoRA divides by the rank instead of its root",
            "self.rank**0.5 if self.rslora else self.rank",
            "self.rank if self.rslora else self.rank",
            "models/test_lora.py::test_adapted_kernel_adds_scaled_low_rank_product",
        ),
    ),
    *of(
        "transformer_jax/config/mesh.py",
        (
            "rows are split over only one of two axes",
            "return self.data * self.fsdp",
            "return max(self.data, self.fsdp)",
            "config/test_config_limits.py::test_derived_config_values_match_fields",
        ),
    ),
    *of(
        "transformer_jax/config/model.py",
        (
            "the default feed-forward width is 2x instead of 4x",
            "return 4 * self.d_model if self.d_ff is None",
            "return 2 * self.d_model if self.d_ff is None",
            "config/test_config.py::test_default_sizes_are_derived_from_other_fields",
        ),
        (
            "norm_order is accepted without a norm",
            'unread(self, rule, "norm_order")',
            "pass",
            "models/test_layers.py::test_norm_options_without_norm_raise_error",
        ),
    ),
    *of(
        "transformer_jax/config/positions.py",
        (
            "a windowed layer uses the default rotary pairing",
            "Rope(base=self.window_base, dims=self.dims, pairing=self.pairing)",
            "Rope(base=self.window_base, dims=self.dims)",
            "config/test_config.py::test_pooler_and_layer_rotation_are_derived_from_other_fields",
        ),
    ),
    *of(
        "transformer_jax/corpus/documents.py",
        (
            "document offsets count from the last block",
            "start, seen = start + tail, seen[tail:]",
            "seen = seen[tail:]",
            "cli/test_prepare.py::test_chunk_boundaries_do_not_depend_on_read_size",
        ),
    ),
    *of(
        "transformer_jax/corpus/folder.py",
        (
            "a read continues past the end of a file",
            "into[done : done + self.shard_tokens - at]",
            "into[done : done + self.shard_tokens]",
            "cli/test_prepare.py::test_token_files_have_at_most_shard_size",
        ),
    ),
    *of(
        "transformer_jax/corpus/prepare.py",
        (
            "65536 IDs use 32 bits",
            "tokenizer.vocab_size <= 2**16 else",
            "tokenizer.vocab_size < 2**16 else",
            "cli/test_prepare.py::test_65536_token_ids_fit_into_16_bits",
        ),
        (
            "a document ends one token late",
            "dtype=np.int64) - 1\n",
            "dtype=np.int64)\n",
            "cli/test_prepare.py::test_documents_keep_order_and_are_not_split_between_parts",
        ),
    ),
    *of(
        "transformer_jax/decoding/batch_rows.py",
        (
            "an out-of-range row overwrites the last row",
            'x.at[rows].set(y, mode="drop")',
            'x.at[rows].set(y, mode="clip")',
            "decoding/test_generation.py::test_state_rows_can_be_gathered_forked_written_and_selected",
        ),
    ),
    *of(
        "transformer_jax/decoding/beams.py",
        (
            "a text found by two groups is returned twice",
            "before = np.tril(np.ones(same.shape[1:], bool), -1)[None]",
            "before = np.tril(np.ones(same.shape[1:], bool), -2)[None]",
            "decoding/test_beams.py::test_narrow_beams_match_python_reference",
        ),
    ),
    *of(
        "transformer_jax/decoding/arguments.py",
        (
            "a row with no new tokens skips the last prompt token",
            "numpy.maximum(limits, 1) - 1",
            "limits - 1",
            "decoding/test_generation.py::test_prompt_and_generated_tokens_must_fit_cache",
        ),
    ),
    *of(
        "transformer_jax/decoding/generation.py",
        (
            "a row continues for one token past its limit",
            "active = active & (count < decode_state.limits)",
            "active = active & (count <= decode_state.limits)",
            "decoding/test_generation.py::test_limits_below_num_tokens_end_only_their_rows",
        ),
        (
            "every token of a row uses the same key",
            "keys = jax.vmap(jax.random.fold_in)(decode_state.keys, decode_state.count)",
            "keys = decode_state.keys",
            "decoding/test_decode.py::test_nth_token_is_sampled_with_key_folded_with_n",
        ),
        (
            "chunked prefill returns only the last chunk's logits",
            "here = (offset >= 0) & (offset < chunk)",
            "here = offset < chunk",
            "decoding/test_decode.py::test_prefill_returns_logits_after_last_token_in_each_row "
            "decoding/test_decode.py::test_chunked_prefill_generates_same_tokens",
        ),
    ),
    *of(
        "transformer_jax/decoding/logit_processors.py",
        (
            "a banned sequence is allowed after its shortest prefix",
            "(history.length >= size - 1)",
            "(history.length > size - 1)",
            "decoding/test_logit_processors.py::test_banned_sequence_is_blocked_once_its_prefix_matches",
        ),
        (
            "an n-gram can extend past the text",
            "again = at < length[:, None]",
            "again = at <= length[:, None]",
            "decoding/test_logit_processors.py::test_logit_processors_match_python_reference",
        ),
        (
            "a repetition penalty raises negative logits",
            "jnp.where(logits > 0, logits / self.p, logits * self.p)",
            "logits / self.p",
            "decoding/test_logit_processors.py::test_logit_processors_match_python_reference",
        ),
        (
            "one extra token is forced",
            "jnp.where((history.new < count)[:, None], forced, logits)",
            "jnp.where((history.new <= count)[:, None], forced, logits)",
            "decoding/test_logit_processors.py::test_logit_processors_match_python_reference",
        ),
        (
            "the first new token is not counted",
            "counted & (at >= self.prompt[:, None])",
            "counted & (at > self.prompt[:, None])",
            "decoding/test_logit_processors.py::test_logit_processors_match_python_reference",
        ),
    ),
    *of(
        "transformer_jax/decoding/samplers.py",
        (
            "the entropy has the wrong sign",
            "-jnp.abs(below - mean))",
            "-jnp.abs(below + mean))",
            "decoding/test_samplers.py::test_sampler_keeps_same_tokens_as_python_reference",
        ),
        (
            "a tie keeps one token too few",
            "jnp.cumsum(equal, axis=-1) <= room",
            "jnp.cumsum(equal, axis=-1) < room",
            "decoding/test_samplers.py::test_sampler_edge_cases_keep_correct_tokens",
        ),
    ),
    *of(
        "transformer_jax/models/flops.py",
        (
            "a two-sided window counts the query twice",
            "return before + after - length",
            "return before + after",
            "training/test_plan.py::test_flop_formula_matches_brute_force_count",
        ),
    ),
    *of(
        "transformer_jax/models/functional.py",
        (
            "dropout keeps the values to drop",
            "~jax.random.bits(key, x.shape, jnp.uint32) >= jnp.uint32(threshold(rate))",
            "jax.random.bits(key, x.shape, jnp.uint32) <= jnp.uint32(threshold(rate))",
            "models/test_layers.py::test_dropout_scales_kept_elements",
        ),
    ),
    *of(
        "transformer_jax/models/ops.py",
        (
            "a norm adds eps after the root",
            "jax.lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + eps)",
            "1 / (jnp.sqrt((y * y).mean(axis=-1, keepdims=True)) + eps)",
            "models/test_layers.py::test_norms_match_formulas "
            "models/test_layers.py::test_constant_vector_has_finite_norm_and_gradient",
        ),
    ),
    *of(
        "transformer_jax/models/block.py",
        (
            "query and key norms use the stored scale without its offset",
            "setattr(self, name, norm_scale(self, name, cfg, *shape))",
            "setattr(self, name, self.param(name, nn.initializers.ones, shape))",
            "models/test_layers.py::test_query_key_norm_uses_configured_epsilon",
        ),
        (
            "a parallel branch reads the previous branch's output",
            "read = before if cfg.is_parallel else x",
            "read = x",
            "models/test_places.py::test_parallel_branches_receive_block_input",
        ),
    ),
    *of(
        "transformer_jax/models/ops.py",
        (
            "a negative ID reads a row from the end",
            "    ids = jnp.where(ids < 0, table.shape[0], ids)\n",
            "",
            "models/test_layers.py::test_out_of_range_embedding_lookup_returns_nan",
        ),
    ),
    *of(
        "transformer_jax/models/places.py",
        (
            "an edit in a scan applies to every block",
            "jnp.where(here, changed, value)",
            "changed",
            "models/test_places.py::test_editing_one_block_does_not_affect_others",
        ),
        (
            "capture returns the value before the edit",
            "            value = changed\n        if name",
            "            if name in self.capture:\n"
            "                self.captured.setdefault(name, value)\n"
            "                continue\n"
            "            value = changed\n        if name",
            "models/test_places.py::test_editing_one_block_does_not_affect_others",
        ),
        (
            "a scan returns the first block's capture for every block",
            "scanned[at[2]][:, int(at[1])]",
            "scanned[at[2]][:, 0]",
            "models/test_places.py::test_captured_values_match_in_looped_and_scanned_stacks",
        ),
        (
            "a scan returns only the last block's capture",
            "jnp.where(layer == int(at[1]), captured[at[2]], sparse[name])",
            "captured[at[2]]",
            "models/test_places.py::test_scanned_stack_captures_only_requested_blocks",
        ),
    ),
    *of(
        "transformer_jax/models/lora.py",
        (
            "adapters of a scanned stack have the wrong axis order",
            "jnp.stack(leaves, axis=int(_is_scanned(path_name(path))))",
            "jnp.stack(leaves, axis=0)",
            "models/test_adapters.py::test_each_row_uses_its_own_adapter",
        ),
        (
            "unmerging adapters adds them again",
            'path[-1].key == "b" else leaf',
            'path[-1].key in "ab" else leaf',
            "models/test_adapters.py::test_unmerge_restores_kernels_within_two_roundings",
        ),
        (
            "adapters are merged without their scale",
            "delta = config.scale * jnp.matmul(",
            "delta = jnp.matmul(",
            "models/test_lora.py::test_adapted_kernel_adds_scaled_low_rank_product",
        ),
    ),
    *of(
        "transformer_jax/lectures/ngram.py",
        (
            "a binary search stops one step early",
            "steps = (self.config.vocab_size + 1).bit_length()",
            "steps = self.config.vocab_size.bit_length() - 1",
            "lectures/test_ngram.py::test_ngram_search_covers_full_vocabulary",
        ),
        (
            "the discount miscounts n-grams that occur twice",
            "discount = once / (once + 2 * twice)",
            "discount = once / (once + twice)",
            "lectures/test_ngram.py::test_discounted_mass_is_assigned_to_shorter_context",
        ),
        (
            "the start token is predicted",
            "count = np.where(word == size - 1, 0, count)",
            "count = np.asarray(count)",
            "lectures/test_ngram.py::test_ngram_probabilities_match_formula_for_every_context",
        ),
    ),
    *of(
        "transformer_jax/models/positions.py",
        (
            "YaRN's bounds are rounded inward",
            "fast, slow = math.floor(fast), math.ceil(slow)",
            "fast, slow = math.ceil(fast), math.floor(slow)",
            "models/test_positions.py::test_rotary_frequencies_match_paper "
            "models/test_positions.py::test_rotary_frequencies_match_released_checkpoints",
        ),
        (
            "learned positions ignore the table's offset",
            "row = jnp.maximum(positions, 0) + offset",
            "row = jnp.maximum(positions, 0)",
            "models/test_positions.py::test_learned_positions_select_table_rows_and_zero_padding",
        ),
        (
            "Shaw's relative vectors have reversed distances",
            "-clip, clip)[:, None] + clip",
            "-clip, clip)[:, None] * -1 + clip",
            "models/test_positions.py::test_shaw_attention_and_gradients_match_loops",
        ),
    ),
    *of(
        "transformer_jax/models/quantized.py",
        (
            "logits of a quantized table omit the bias",
            "return ops.logits(x, table.astype(x.dtype), bias, invariant=invariant)",
            "return ops.logits(x, table.astype(x.dtype), None, invariant=invariant)",
            "models/test_quantized.py::test_logits_from_8_bit_table_with_bias_match_float64",
        ),
        (
            "the group scales of 4-bit kernels are those of the previous output",
            "products.dequantize_words(self.values, self.scale, inputs)",
            "products.dequantize_words(self.values, jnp.roll(self.scale, 1, -1), inputs)",
            "models/test_quantized.py::test_quantization_error_is_at_most_half_a_step",
        ),
    ),
    *of(
        "transformer_jax/lectures/recent_tokens.py",
        (
            "a state's length counts padding",
            "length = state.length + read\n",
            "length = state.length + tokens.shape[1]\n",
            "lectures/test_recent_tokens.py::test_padded_chunks_match_full_forward",
        ),
        (
            "a window extends into the previous document",
            "jnp.where(same, line[rows, index], -1)",
            "line[rows, index]",
            "lectures/test_recent_tokens.py::test_packed_documents_match_separate_documents",
        ),
    ),
    *of(
        "transformer_jax/lectures/recurrent.py",
        (
            "decoding donates the caller's padding mask",
            "valid = jnp.array(valid, copy=True)",
            "valid = jnp.asarray(valid)",
            "lectures/test_recurrent.py::test_decoding_donates_state_but_not_caller_arrays",
        ),
        (
            "a reversed document starts at the wrong end",
            "ends = first_tokens(number_documents(segments[:, ::-1]), valid[:, ::-1])[:, ::-1]",
            "ends = starts",
            "lectures/test_recurrent.py::test_tagger_processes_each_document_in_both_directions",
        ),
    ),
    *of(
        "transformer_jax/lectures/recurrent.py",
        (
            "the state of packed rows covers all documents",
            "state = replace(state, length=read)",
            "pass",
            "lectures/test_recurrent.py::test_packed_documents_match_separate_documents",
        ),
    ),
    *of(
        "transformer_jax/models/stack.py",
        (
            "distance biases with learned positions have T5's range",
            "max_distance=cfg.positions.max_distance",
            "max_distance=128",
            "models/test_transformer.py::test_logits_match_reference",
        ),
    ),
    *of(
        "transformer_jax/models/streaming.py",
        (
            "a padding row counts as part of its chunk",
            "(first % self.chunk != 0) & (p >= 0).any(axis=1)",
            "first % self.chunk != 0",
            "models/test_streaming.py::test_all_padding_row_is_accepted_at_any_chunk_offset",
        ),
        (
            "each layer counts the token again in its window",
            "return 1 + sum(window - 1 for window in windows",
            "return 1 + sum(window for window in windows",
            "models/test_streaming.py::test_streaming_receptive_field_is_exact",
        ),
        (
            "a chunk sees one frame less of its history",
            "(kept | (after >= -self.history))",
            "(kept | (after > -self.history))",
            "models/test_streaming.py::test_streaming_chunk_attends_to_itself_and_history",
        ),
        (
            "a stream rewinds by part of a chunk",
            "step = math.lcm(state.capacity, multiple)",
            "step = state.capacity",
            "models/test_streaming.py::test_rebase_shifts_positions_by_whole_chunks",
        ),
    ),
    *of(
        "transformer_jax/lectures/convolution.py",
        (
            "a layer's residual is one token too old",
            "x = x[:, cfg.kernel_size - 1 :] + value",
            "x = x[:, : value.shape[1]] + value",
            "lectures/test_recent_tokens.py::test_forward_pass_matches_formula",
        ),
    ),
    *of(
        "transformer_jax/models/transformer.py",
        (
            "the pooler's mean counts padding",
            "x = total / jnp.maximum(valid.sum(axis=1), 1)[:, None]",
            "x = total / x.shape[1]",
            "models/test_transformer.py::test_class_logits_with_head_transform_match_reference",
        ),
    ),
    *of(
        "transformer_jax/lectures/window.py",
        (
            "token 0 precedes the text",
            "vectors = jnp.where(begins, self.begin[None, None, None], vectors)",
            "vectors = jnp.where(begins & False, self.begin[None, None, None], vectors)",
            "lectures/test_recent_tokens.py::test_forward_pass_matches_formula",
        ),
    ),
    *of(
        "transformer_jax/pretrained/families/decoder_keys.py",
        (
            "YaRN's multiplier ignores its scale",
            "0.1 * scale * math.log(factor) + 1.0",
            "0.1 * math.log(factor) + 1.0",
            "pretrained/test_load.py::test_rope_scaling_config_is_loaded",
        ),
        (
            "the stretched length is saved as the trained length",
            "round(rope.original_len * rope.factor)",
            "rope.original_len",
            "pretrained/test_load.py::test_max_position_embeddings_is_written_as_scaled_length",
        ),
    ),
    *of(
        "transformer_jax/pretrained/families/bart.py",
        (
            "every family loads as post-norm",
            'Fixed(kind="encoder-decoder", norm_order=order)',
            'Fixed(kind="encoder-decoder", norm_order="post")',
            "pretrained/test_seq2seq_folders.py::test_pre_norm_seq2seq_matches_formulas",
        ),
        (
            "M2M-100 positions start at the padding token",
            'first, base = keys.integer("pad_token_id", 1, least=0) + 1, 10_000',
            'first, base = keys.integer("pad_token_id", 1, least=0), 10_000',
            "pretrained/test_load.py::test_missing_keys_have_transformers_defaults",
        ),
    ),
    *of(
        "transformer_jax/pretrained/families/other_keys.py",
        (
            "an ALBERT with several groups loads as one group",
            "dict(num_hidden_groups=[1], inner_group_num=[1])",
            "dict(num_hidden_groups=[1, 2], inner_group_num=[1])",
            "pretrained/test_family_folders.py::test_unsupported_keys_that_affect_results_are_rejected",
        ),
    ),
    *of(
        "transformer_jax/pretrained/families/nomic_bert.py",
        (
            "the older key of the rotary base is not read",
            "read_rope(keys, fields, default=base)",
            "read_rope(keys, fields, default=BASE)",
            "pretrained/test_family_folders.py::test_both_nomic_bert_config_styles_are_equivalent",
        ),
    ),
    *of(
        "transformer_jax/pretrained/gguf.py",
        (
            "gpt-oss gate and up are concatenated instead of interleaved",
            "np.stack(tensors, axis=-1).reshape(*tensors[0].shape[:-1], -1)",
            "np.concatenate(tensors, axis=-1)",
            "pretrained/test_gguf_gpt_oss.py::test_gpt_oss_mxfp4_experts_round_trip",
        ),
    ),
    *of(
        "transformer_jax/pretrained/families/table.py",
        (
            "interleaved rows are saved one parameter after the other",
            "return np.concatenate(runs, axis=1).reshape(-1, *rest)",
            "return np.concatenate(pieces)",
            "pretrained/test_family_folders.py"
            "::test_interleaved_qkv_rows_are_split_and_joined_correctly",
        ),
    ),
    *of(
        "transformer_jax/pretrained/peft.py",
        (
            "interleaved kernel rows are loaded without reordering",
            "b = b[np.argsort(kernels.rows([found[kernel][1] for kernel in kernels]))]",
            "b = b[np.arange(len(b))]",
            "models/test_lora.py::test_interleaved_qkv_adapters_round_trip",
        ),
    ),
    *of(
        "transformer_jax/pretrained/sentences.py",
        (
            "a pooled mean counts padding",
            "kept.sum(axis=1) / jnp.maximum(valid.sum(axis=1), 1)[:, None]",
            "kept.mean(axis=1)",
            "pretrained/test_sentences.py::test_pooling_ignores_invalid_tokens",
        ),
    ),
    *of(
        "transformer_jax/decoding/writer.py",
        (
            "the shortest of several matching stop strings is removed",
            "self.pending[: -max(map(len, matches))]",
            "self.pending[: -min(map(len, matches))]",
            "decoding/test_completion.py::test_longest_matching_stop_string_is_removed",
        ),
        (
            "buffered text is lost at the end",
            "return text if stopped else text + self.matcher.pending",
            "return text",
            "decoding/test_completion.py::test_decoded_text_does_not_depend_on_token_boundaries",
        ),
        (
            "a token after an invalid character has the wrong offset",
            "self.start = self.length + broken",
            "self.start = self.length",
            "decoding/test_completion.py::test_token_start_is_index_of_first_character",
        ),
    ),
    *of(
        "transformer_jax/server/protocol.py",
        (
            "partial characters share one name",
            'return "bytes:" + "".join(f"\\\\x{byte:02x}" for byte in piece)',
            'return "bytes:"',
            "server/test_protocol.py::test_stream_parts_join_to_whole_answer",
        ),
    ),
    *of(
        "transformer_jax/text/scores.py",
        (
            "a score omits its first label",
            "labels[: first - 1] = IGNORE",
            "labels[:first] = IGNORE",
            "text/test_language_model.py::test_text_score_is_sum_of_log_probabilities",
        ),
        (
            "overlapping windows count labels twice",
            "here[done - start : end - start] = tokens[start:end], labels[done:end]",
            "here[: end - start] = tokens[start:end], labels[start:end]",
            "text/test_language_model.py::test_evaluation_windows_score_each_label_once_with_enough_context",
        ),
    ),
    *of(
        "transformer_jax/tokenizers/special.py",
        (
            "translation targets use the source language's markers",
            "tuple(language if i in named else i for i in ids)",
            "tuple(i for i in ids)",
            "training/test_family_rows.py"
            "::test_translation_rows_use_source_and_target_language_tokens",
        ),
        (
            "special tokens reuse the last text ID",
            "name: self.base.vocab_size + i for i, name",
            "name: self.base.vocab_size - 1 + i for i, name",
            "training/test_task_data.py::test_special_tokens_follow_text_tokens_and_decode_to_nothing",
        ),
    ),
    *of(
        "transformer_jax/tokenizers/trained.py",
        (
            "rare words get the first IDs",
            "key=lambda word: (-found[word], word)",
            "key=lambda word: (found[word], word)",
            "training/test_task_data.py::test_word_tokenizer_normalizes_spaces",
        ),
        (
            "an unknown character maps to the nearest one",
            "wrong = np.flatnonzero(known[ids] != points)",
            "wrong = np.flatnonzero(known[ids] < points)",
            "training/test_data.py::test_character_adjacent_to_known_one_is_unknown",
        ),
    ),
    *of(
        "transformer_jax/training/data.py",
        (
            "windows can start at the last token",
            "np.arange(0, tokens - 1, length, dtype=np.int32)",
            "np.arange(0, tokens, length, dtype=np.int32)",
            "training/test_data.py::test_consecutive_windows_cover_every_label_once",
        ),
    ),
    *of(
        "transformer_jax/training/losses.py",
        (
            "the z-loss gradient is halved",
            "scale = scale * (1 + 2 * terms.z * lse)",
            "scale = scale * (1 + terms.z * lse)",
            "training/test_losses.py::test_loss_and_gradients_match_formula",
        ),
        (
            "label smoothing excludes the label",
            "rest = terms.smoothing / vocab",
            "rest = terms.smoothing / (vocab - 1)",
            "training/test_losses.py::test_loss_and_gradients_match_formula",
        ),
        (
            "an ignored hidden state contributes to the table's gradient",
            "hidden = jnp.where(counts[..., None], hidden, 0)",
            "hidden = jnp.asarray(hidden)",
            "training/test_losses.py::test_ignored_hidden_states_do_not_affect_loss",
        ),
    ),
    *of(
        "transformer_jax/training/planning/memory.py",
        (
            "the memory plan omits gradients",
            "needed = parameters + optimizer + gradients",
            "needed = parameters + optimizer",
            "training/test_plan.py::test_training_state_that_leaves_no_memory_for_gradients_is_rejected",
        ),
    ),
    *of(
        "transformer_jax/training/optimizers.py",
        (
            "a frozen name matches any path prefix",
            'f"{name}/".startswith(f"{part.strip(\'/\')}/")',
            "name.startswith(part.strip('/'))",
            "training/test_optimizers.py::test_frozen_name_matches_whole_path_components",
        ),
        (
            "frozen gradients count toward the clipping norm",
            "optax.chain(*last, optax.clip_by_global_norm(config.clip_norm))",
            "optax.chain(optax.clip_by_global_norm(config.clip_norm), *last)",
            "training/test_optimizers.py::test_frozen_gradients_do_not_affect_updates",
        ),
        (
            "all layers of a scanned stack share Adafactor's clipping",
            "of_one = tuple(range(first, grad.ndim))",
            "of_one = tuple(range(grad.ndim))",
            "training/test_optimizers.py::test_adafactor_treats_each_expert_of_each_layer_separately",
        ),
        (
            "weight decay applies to head biases",
            'leaf.ndim - layers >= 2 and not names[-1].endswith(("bias", "scale", "sinks"))',
            "leaf.ndim - layers >= 2",
            "training/test_training.py::test_weight_decay_skips_same_parameters_in_stacked_layers",
        ),
        (
            "the learning rate decays from step one after warm-up",
            "jnp.sqrt((warmup + 1) / (count + warmup + 1))",
            "jnp.sqrt((warmup + 1) / (count + 1))",
            "training/test_schedules.py::test_schedule_warms_up_linearly_then_follows_formula",
        ),
        (
            "ScheduleFree averages its fast sequence",
            "(y - (1 - state.b1) * z) / state.b1",
            "(y + (1 - state.b1) * z) / state.b1",
            "training/test_optimizers.py::test_schedule_free_is_evaluated_at_average_of_steps",
        ),
    ),
    *of(
        "transformer_jax/training/planning/plan.py",
        (
            "the memory plan stores gradients in the parameters' dtype",
            'trained if config.param_dtype == "float32" else 2 * trained',
            "trained",
            "training/test_plan.py::test_plan_assumes_float32_gradients",
        ),
        (
            "the decoding plan counts writes of parameters",
            "written = resident if self.cache == 0 else 0",
            "written = resident",
            "training/test_plan.py::test_lookup_table_is_not_counted_as_read",
        ),
    ),
    *of(
        "transformer_jax/training/preference.py",
        (
            "a tie of rewards counts as correct",
            "found > 0, False)",
            "found >= 0, False)",
            "training/test_table_model_losses.py::test_preference_scores_match_formula",
        ),
        (
            "the reference model gets a gradient",
            "initial = jax.lax.stop_gradient(log_probs(reference, batch, None))",
            "initial = log_probs(reference, batch, None)",
            "training/test_preference.py::test_preference_loss_starts_at_log_2_and_separates_answers",
        ),
    ),
    *of(
        "transformer_jax/training/rows.py",
        (
            "a packed prefix is written at the start of the row",
            "prefix[row, here] = example.prefix",
            "prefix[row, :size] = example.prefix",
            "training/test_rows.py::test_prefix_of_packed_example_covers_its_first_tokens",
        ),
        (
            "an example that fits exactly starts a new row",
            "if room >= size), len(rooms))",
            "if room > size), len(rooms))",
            "training/test_rows.py::test_example_can_exactly_fill_remaining_space",
        ),
        (
            "padding rows have labels",
            'FILL = {"labels": IGNORE}',
            'FILL = {"label": IGNORE}',
            "training/test_rows.py::test_evaluation_visits_every_row_once_and_pads_last_batch",
        ),
        (
            "every epoch has the same order",
            "order = _shuffled(seed, epoch, bucket + 1, self.counts[bucket])",
            "order = _shuffled(seed, 0, bucket + 1, self.counts[bucket])",
            "training/test_rows.py::test_single_step_epochs_have_different_orders",
        ),
    ),
    *of(
        "transformer_jax/training/spikes.py",
        (
            "an outlier loss counts in the running statistics",
            "if finite and not high:",
            "if finite:",
            "training/test_monitoring.py::test_loss_far_above_median_is_reported_as_spike",
        ),
    ),
    *of(
        "transformer_jax/training/step.py",
        (
            "micro-batches share a dropout key",
            "differentiate(params, batch, jax.random.fold_in(key, index), frozen)",
            "differentiate(params, batch, jax.random.fold_in(key, 0 * index), frozen)",
            "training/test_training.py::test_dropout_differs_by_step_and_micro_batch",
        ),
        (
            "micro-batches have equal weight regardless of their tokens",
            "return mean * weight, weight\n",
            "return mean * (weight > 0), 1.0 * (weight > 0)\n",
            "training/test_training.py::test_micro_batches_match_one_large_batch",
        ),
        (
            "the last token of a text gets a label",
            "jnp.where(index < last, labels, IGNORE)",
            "jnp.where(index <= last, labels, IGNORE)",
            "training/test_training.py::test_windows_predict_next_token_without_reading_past_end",
        ),
        (
            "the average moves by the decay instead of its complement",
            "incremental_update(new, average, 1 - ema_decay)",
            "incremental_update(new, average, ema_decay)",
            "training/test_optimizers.py::test_parameter_average_matches_formula_and_skips_rejected_steps",
        ),
        (
            "a nonfinite gradient is applied",
            "accepted = jnp.isfinite(mean) & jnp.isfinite(norm)",
            "accepted = jnp.isfinite(mean)",
            "training/test_training.py::test_nonfinite_step_does_not_change_parameters",
        ),
    ),
    *of(
        "transformer_jax/models/layers.py",
        (
            "a bias without a config field is ignored",
            """        refuse_surplus(self)
        x = x.astype(cfg.dtype)""",
            """        x = x.astype(cfg.dtype)""",
            "models/test_surplus.py::test_surplus_parameter_error_names_parameter_and_field",
        ),
    ),
    *of(
        "transformer_jax/training/tasks/masked.py",
        (
            "every evaluation batch masks the same positions",
            "counter=1 + first * blocks",
            "counter=1",
            "training/test_task_data.py::test_masked_tokens_do_not_depend_on_batch_composition",
        ),
        (
            "an evaluation omits its last window",
            "np.arange(0, len(self.data.val) - length + 1, length, dtype=np.int32)",
            "np.arange(0, len(self.data.val) - length, length, dtype=np.int32)",
            "training/test_task_data.py::test_masked_evaluation_covers_every_full_window",
        ),
        (
            "unchanged masked tokens become random tokens",
            "(how < replaced + task.random), random, hidden)",
            "(how < replaced + 1), random, hidden)",
            "training/test_task_data.py::test_masked_tokens_are_replaced_in_configured_proportions",
        ),
    ),
    *of(
        "transformer_jax/training/tasks/metrics.py",
        (
            "an equal item costs a substitution",
            "before[j - 1] + (item != other))",
            "before[j - 1] + 1)",
            "training/test_task_data.py::test_edit_distance_matches_definition",
        ),
        (
            "F1 counts absent classes",
            "counted = total > 0",
            "counted, total = total >= 0, np.maximum(total, 1)",
            "training/test_task_data.py::test_f1_is_averaged_over_occurring_classes",
        ),
    ),
    *of(
        "transformer_jax/interpret/heads.py",
        (
            "an induction score is shifted by one token",
            "score(period - 1, period))",
            "score(period - 2, period))",
            "interpret/test_heads.py::test_head_that_attends_only_to_target_token_scores_one",
        ),
        (
            "a rollout omits the residual stream",
            "mixed = weights.astype(jnp.float32).mean(axis=2) + jnp.eye(T)[None, None]",
            "mixed = weights.astype(jnp.float32).mean(axis=2)",
            "interpret/test_heads.py::test_attention_rollout_multiplies_layers_and_rows_sum_to_one",
        ),
    ),
    *of(
        "transformer_jax/interpret/gradients.py",
        (
            "integration points come only from the first half of the path",
            "(nodes + 1) / 2, x1.dtype",
            "(nodes + 1) / 4, x1.dtype",
            "interpret/test_heads.py::test_integrated_gradients_are_exact_for_quadratic_function",
        ),
    ),
    *of(
        "transformer_jax/interpret/patching.py",
        (
            "patching uses the previous token",
            "selected = selected & (jnp.arange(sizes[i]) == index[i]).reshape(shape)",
            "selected = selected & (jnp.arange(sizes[i]) == index[i] - 1).reshape(shape)",
            "interpret/test_patching.py::test_patching_logits_at_one_token_copies_clean_logits",
        ),
        (
            "attribution patching has the wrong sign",
            "(value.astype(jnp.float32) - before[name].astype(jnp.float32)) * gradient",
            "(before[name].astype(jnp.float32) - value.astype(jnp.float32)) * gradient",
            "interpret/test_patching.py::test_patching_logits_at_one_token_copies_clean_logits",
        ),
    ),
    *of(
        "transformer_jax/interpret/paths.py",
        (
            "branches on a path stay fixed at the clean prompt",
            "constants = run(model, params, arguments, corrupted, capture=frozen)[1]",
            "constants = run(model, params, arguments, clean, capture=frozen)[1]",
            "interpret/test_paths.py::test_embedding_direct_effect_equals_its_logit_contribution",
        ),
    ),
    *of(
        "transformer_jax/interpret/edits.py",
        (
            "a mean over tokens is taken over rows",
            '{"tokens": (tokens,), "rows": (0,), ',
            '{"tokens": (0,), "rows": (tokens,), ',
            "interpret/test_edits.py::test_value_edit_matches_numpy",
        ),
        (
            "an edit applies to the next token",
            "(positions[..., None] == at[None, None])",
            "(positions[..., None] == at[None, None] + 1)",
            "interpret/test_edits.py::test_value_edit_matches_numpy",
        ),
    ),
    *of(
        "transformer_jax/interpret/lens.py",
        (
            "the lens skips the final norm",
            'x = x if model.config.norm_order == "post" else stack.norm(x)',
            'x = x if model.config.norm_order != "post" else stack.norm(x)',
            "interpret/test_lens.py::test_logit_lens_of_embedding_is_normalized_and_projected",
        ),
        (
            "a logit contribution omits the norm's scale",
            "d = d * scale[None, None]",
            "d = d * jnp.ones_like(scale)[None, None]",
            "interpret/test_lens.py::test_logit_attributions_sum_to_logit_and_logit_difference[gpt2]",
        ),
        (
            "the other token's logit is added instead of subtracted",
            "return first - rest[0] if rest else first",
            "return first + rest[0] if rest else first",
            "interpret/test_lens.py::test_logit_attributions_sum_to_logit_and_logit_difference[gpt2]",
        ),
    ),
    *of(
        "transformer_jax/interpret/tuned_lens.py",
        (
            "the lens divergence is reversed",
            "(jnp.exp(log_p) * (log_p - log_q))",
            "(jnp.exp(log_q) * (log_q - log_p))",
            "interpret/test_tuned_lens.py::test_tuned_lens_logits_and_divergence_match_translated_streams",
        ),
    ),
    *of(
        "transformer_jax/interpret/steering.py",
        (
            "the last token of a shorter text is padding",
            "index == counts[:, None] - 1 if",
            "index == tokens.shape[1] - 1 if",
            "interpret/test_steering.py::test_embedding_steering_vector_matches_embedding_tables",
        ),
    ),
    *of(
        "transformer_jax/interpret/probes.py",
        (
            "a probe's bias ignores the mean of its inputs",
            "bias = (mean - centre @ kernel)[0]",
            "bias = mean[0]",
            "interpret/test_probes.py::test_regression_probe_satisfies_normal_equations[False]",
        ),
    ),
    *of(
        "transformer_jax/interpret/hooks.py",
        (
            "the stream before a block is read after it",
            'f"block_{number - 1}/residual"',
            'f"block_{number}/residual"',
            "interpret/test_hooks.py::test_captured_places_match_hook_values[gpt2]",
        ),
    ),
    *of(
        "transformer_jax/server/engine.py",
        (
            "an answer ended by a stop string keeps its slot",
            "self.batcher.drop(ticket)",
            "",
            "server/test_app.py::test_stop_string_ends_answer_before_it",
        ),
    ),
    *of(
        "transformer_jax/server/schemas.py",
        (
            "true is accepted as a number",
            """        return "boolean" in kinds
""",
            """        return True
""",
            "server/test_protocol.py::test_invalid_request_raises_one_line_error",
        ),
    ),
    *of(
        "transformer_jax/lectures/demos/rotations.py",
        (
            "a pair of sinusoids rotates in the wrong direction",
            "angle = k * 10_000.0",
            "angle = -k * 10_000.0",
            "lectures/demos/test_demos.py::test_rotation_shifts_sinusoid_table",
        ),
    ),
)
