"""Slips of one place each, as an engineer could make them, and the default tests that see them.

Where a change of the code takes a slip's old text away, write the slip anew for the new code, or
another of its kind.
"""

from __future__ import annotations

from typing import NamedTuple


class Slip(NamedTuple):
    """Hold a slip: `old` stands once in the file, and `new` takes its place."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Return the arguments of pytest."""


def of(file: str, *slips: tuple[str, str, str, str]) -> tuple[Slip, ...]:
    """Return slips of one file: each is its name, the old text, the new one, and its tests."""
    return tuple(
        Slip(name, file, old, new, tuple(f"tests/{test}" for test in tests.split()))
        for name, old, new, tests in slips
    )


SLIPS: tuple[Slip, ...] = (
    *of(
        "transformer_jax/models/experts.py",
        (
            "weights of sigmoids are left as they are",
            "        if experts.normalize:",
            "        if experts.normalize and bias is None:",
            "models/test_experts.py::test_a_token_is_given_to_the_experts_that_its_router_chooses",
        ),
        (
            "an expert's rows begin a block too late",
            "begin = (ends + sizes // -block)[chosen[order]]",
            "begin = (ends + sizes // -block)[chosen[order]] + 1",
            "models/test_experts.py::test_rows_meet_their_expert_however_many_each_has",
        ),
        (
            "padding counts in the balance of experts",
            "            share = valid.astype(F32) / jnp.maximum(valid.sum(), 1)",
            "            share = jnp.ones_like(valid, F32) / valid.size",
            "models/test_experts.py::test_losses_are_those_of_the_formulas",
        ),
    ),
    *of(
        "kernels/sharding.py",
        (
            "arrays of one row are shared by all calls of a vmap",
            "return x is pairs or B > 1",
            "return True",
            "kernels/test_gradient.py::test_a_kernel_of_one_row_has_as_many_rows_as_calls",
        ),
    ),
    *of(
        "kernels/contract.py",
        (
            "after its end a list repeats a tile too far",
            "xp.minimum(steps, xp.maximum(seen - 1, 0)[..., None])",
            "xp.minimum(steps, seen[..., None])",
            "kernels/test_tile_lists.py::test_after_the_last_tile_a_list_repeats_it",
        ),
    ),
    *of(
        "kernels/derivatives.py",
        (
            "tangents of the gradient by what is known are left out",
            "        parts.append(_along(lambda xs: compute(*xs), arrays, by_known))",
            "        parts += [] if parts else [_along(lambda xs: compute(*xs), arrays, by_known)]",
            "kernels/test_derivatives.py::test_gradients_are_of_the_backward_pass_and_all_else_of_the_plain_code",
        ),
        (
            "the wrong gradients are said to be read",
            "[i in moved for i in range(count)]",
            "[i not in moved for i in range(count)]",
            "kernels/test_derivatives.py::test_the_backward_pass_is_told_whose_gradients_are_read",
        ),
    ),
    *of(
        "kernels/dropout.py",
        (
            "heads of all rows drop the same weights",
            "return _absorb(a, b, jnp.arange(B * N, dtype=jnp.uint32).reshape(B, N))",
            "return _absorb(a, b, jnp.zeros((B, N), jnp.uint32))",
            "attention/test_attention.py::TestXla::test_dropout_keeps_its_rate_and_the_expectation "
            "attention/test_attention.py::TestXla::test_every_option_at_once_matches_the_oracle",
        ),
    ),
    *of(
        "kernels/sharding.py",
        (
            "axes of a mesh are put in another order",
            "else tuple(one)\n",
            "else tuple(sorted(one))\n",
            "multi_device/test_meshes.py::test_four_devices_compute_what_one_does[some]",
        ),
    ),
    *of(
        "kernels/tpu/visits.py",
        (
            "a row of tiles that sees nothing is not visited, nor written",
            "return xp.maximum(seen, at_least.astype(np.int32)[None, None])",
            "return seen",
            "kernels/test_visits.py::test_every_listed_tile_is_visited_once_and_in_order",
        ),
        (
            "a visit at the end of a row belongs to that row",
            'side="right", method=search',
            'side="left", method=search',
            "kernels/test_visits.py::test_every_listed_tile_is_visited_once_and_in_order",
        ),
    ),
    *of(
        "transformer_jax/attention/additive.py",
        (
            "additive attention forgets its mask",
            "result = softmax(scores[:, None], visible, nonfinite)",
            "result = softmax(scores[:, None], None, nonfinite)",
            "lectures/test_recurrent.py::test_padding_of_a_source_is_invisible",
        ),
    ),
    *of(
        "transformer_jax/attention/biases.py",
        (
            "slopes of a number of heads that is no power of two are the even ones",
            "for n in range(1, 2 * (num_heads - power), 2)]",
            "for n in range(2, 2 * (num_heads - power) + 1, 2)]",
            "models/test_positions.py::test_slopes_are_those_of_the_paper",
        ),
        (
            "distance 0 counts as after the query",
            "jnp.where(distance > 0, b, 0) if",
            "jnp.where(distance >= 0, b, 0) if",
            "models/test_positions.py::test_buckets_are_those_of_t5",
        ),
    ),
    *of(
        "transformer_jax/attention/blockwise/core.py",
        (
            "the gradient of a capped score that has a bias forgets what is hidden",
            "(call.bias is None or t is not None)",
            "call.bias is None",
            "attention/test_attention.py::test_products_of_hidden_keys_that_overflow_are_in_no_gradient",
        ),
        (
            "the slope of a softcap is 1 - t",
            "ds = ds * (1 - t * t)",
            "ds = ds * (1 - t)",
            "attention/test_attention.py::test_products_of_hidden_keys_that_overflow_are_in_no_gradient",
        ),
        (
            "log l is left out of the weights of the backward pass",
            "p = _exp(s - of.row_max - of.log_sum)",
            "p = _exp(s - of.row_max)",
            "attention/test_attention.py::test_products_of_hidden_keys_that_overflow_are_in_no_gradient",
        ),
    ),
    *of(
        "kernels/program.py",
        (
            "a causal tile is full where its last query sees it all",
            "ends = [(x_high, y_low), (x_low, y_high)]",
            "ends = [(x_high, y_high), (x_low, y_high)]",
            "attention/test_masks.py::test_a_tile_is_full_where_either_of_two_masks_is_full",
        ),
    ),
    *of(
        "transformer_jax/attention/mask.py",
        (
            "a negation shows empty slots",
            "return self.allows(jnp.asarray(q), jnp.asarray(k)) & (k >= 0)[:, None, None, :]",
            "return self.allows(jnp.asarray(q), jnp.asarray(k))",
            "attention/test_masks.py::test_empty_slot_is_never_attended_not_even_under_negation",
        ),
    ),
    *of(
        "transformer_jax/attention/masks.py",
        (
            "a window of the query alone has empty tiles",
            "self.left + self.right < 2",
            "self.left + self.right <= 2",
            "attention/test_masks.py::test_window_counts_the_query_itself",
        ),
        (
            "a window does not count the query itself",
            "q - k <= min(self.left - 1, INT32.max)",
            "q - k <= min(self.left, INT32.max)",
            "attention/test_masks.py::test_window_counts_the_query_itself",
        ),
        (
            "an id after the last is that of another document",
            "(q_ids == k_ids) & q_inside & k_inside",
            "(q_ids == k_ids) & q_inside",
            "attention/test_masks.py::test_segment_ids_may_be_fewer_than_queries_or_keys",
        ),
    ),
    *of(
        "transformer_jax/attention/reference.py",
        (
            "a bad key spoils the query heads of another group",
            "bad_heads = jnp.repeat(~good_key.all(axis=1), group, axis=1)",
            "bad_heads = jnp.tile(~good_key.all(axis=1), (1, group))",
            "attention/test_attention.py::test_without_a_mask_a_bad_key_breaks_the_query_heads_of_its_group",
        ),
        (
            "the slot of position 0 is empty",
            "visible if call.k_positions is None else visible & (k >= 0)[",
            "visible if call.k_positions is None else visible & (k > 0)[",
            "attention/test_attention.py::TestXla::test_masked_keys_and_values_have_no_influence",
        ),
        (
            "a sink leaves the row's maximum as it was",
            "row_max = jnp.maximum(row_max, jax.lax.stop_gradient(sink))",
            "row_max = jnp.maximum(row_max, 0 * jax.lax.stop_gradient(sink))",
            "attention/test_attention.py::TestXla::test_every_option_at_once_matches_the_oracle",
        ),
    ),
    *of(
        "transformer_jax/cache/kv_cache.py",
        (
            "a ring with sinks turns at its whole length",
            "sinks + (positions - sinks) % ring",
            "sinks + positions % ring",
            "cache/test_kv_cache.py::test_a_ring_remembers_the_last_of_many_turns",
        ),
        (
            "a ring is taken to hold one key more than it does",
            "at_most(window + k.shape[1] - 1, cache.capacity - cache.sinks)",
            "at_most(window + k.shape[1] - 2, cache.capacity - cache.sinks)",
            "cache/test_kv_cache.py::test_the_first_of_several_new_queries_sees_its_whole_window",
        ),
        (
            "a token fed again is there twice",
            "positions=jnp.where(replaced, -1, cache.positions))",
            "positions=cache.positions)",
            "cache/test_kv_cache.py::test_a_token_fed_again_replaces_its_old_key",
        ),
        (
            "rewinding keeps the token at the length",
            "jnp.where(cache.positions < length[:, None], cache.positions, -1)",
            "jnp.where(cache.positions <= length[:, None], cache.positions, -1)",
            "cache/test_cache_memory.py::test_rewinding_keeps_exactly_the_positions_below_the_length",
        ),
        (
            "int8 wraps at the largest number",
            "largest(jnp.abs(x)) / 127, jnp.finfo",
            "largest(jnp.abs(x)) / 128, jnp.finfo",
            "cache/test_cache_memory.py::test_a_quantised_row_is_within_half_a_step",
        ),
    ),
    *of(
        "transformer_jax/cache/model_cache.py",
        (
            "a ring is said never to fill that has no room beside its sinks",
            "return slots, slots >= least",
            "return slots, slots >= window",
            "cache/test_cache_memory.py::test_a_full_layer_among_rings_has_an_end "
            "cache/test_cache_memory.py::test_each_layer_has_the_slots_it_needs "
            "cache/test_cache_memory.py::test_a_cache_of_another_pattern_is_refused",
        ),
        (
            "a ring of a pattern has no slack",
            "min(capacity, least + slack)",
            "min(capacity, least)",
            "cache/test_cache_memory.py::test_each_layer_has_the_slots_it_needs",
        ),
    ),
    *of(
        "transformer_jax/cache/paged_cache.py",
        (
            "a page that a row has filled is taken again",
            "(cache.length // cache.page_size)[:, None]\n    touched",
            "((cache.length - 1) // cache.page_size)[:, None]\n    touched",
            "cache/test_paged_cache.py::test_rows_that_share_take_as_many_pages_as_are_said_to_be_needed",
        ),
        (
            "an exhausted row without tokens stays so",
            "exhausted &= (length >= old_length) & (length > 0)",
            "exhausted &= length >= old_length",
            "cache/test_paged_cache.py::test_a_row_without_a_token_may_go_on_once_it_is_rewound",
        ),
        (
            "a block without a page counts as the row's own",
            "unshared = (table >= 0) & (_references(cache)[table] == 1)",
            "unshared = _references(cache)[table] == 1",
            "cache/test_paged_cache.py::test_pages_are_needed_also_where_every_page_is_named",
        ),
        (
            "a row copies a page of its own before it writes",
            "(references[table] > 1))",
            "(references[table] >= 1))",
            "cache/test_paged_cache.py::test_a_row_writes_into_its_own_pages_where_they_lie",
        ),
        (
            "what was taken back comes back with the next token",
            "jnp.where(positions < before.length[:, None, None], positions, -1)",
            "jnp.where(positions < before.length.max(), positions, -1)",
            "cache/test_paged_cache.py::test_what_a_row_took_back_stays_forgotten_beside_a_longer_row",
        ),
        (
            "a full page keeps the one after it",
            "blocks = -(-length // cache.page_size)\n",
            "blocks = length // cache.page_size + 1\n",
            "cache/test_paged_cache.py::test_rows_that_grow_share_fork_and_end_hold_what_a_dictionary_does",
        ),
    ),
    *of(
        "transformer_jax/checkpoints/checkpoint.py",
        (
            "a save holds the caller's array itself",
            "array = value if isinstance(value, jax.Array) else np.array(value)",
            "array = value if isinstance(value, jax.Array) else np.asarray(value)",
            "checkpoints/test_checkpoint.py::test_what_is_saved_are_the_values_at_the_call",
        ),
        (
            "the best checkpoint goes with the old ones",
            "        if step != best:\n",
            "        if step:\n",
            "checkpoints/test_run_folder.py::"
            "test_checkpoints_are_found_pruned_and_set_aside_by_their_steps",
        ),
    ),
    *of(
        "transformer_jax/cli/flags.py",
        (
            "any word but nothing is true",
            'return text.lower() == "true"',
            "return bool(text)",
            "cli/test_flags.py::test_every_field_of_a_run_is_read_back_as_it_is_shown",
        ),
    ),
    *of(
        "transformer_jax/cli/plot.py",
        (
            "each line's time counts from the run's beginning",
            'seconds += (line["step"] - last) * self.tokens_per_step / rate',
            'seconds += line["step"] * self.tokens_per_step / rate',
            "cli/test_plot.py::test_points_stand_at_steps_tokens_or_hours",
        ),
    ),
    *of(
        "transformer_jax/cli/report.py",
        (
            "bits are nats times log 2",
            "bits = nats / math.log(2)",
            "bits = nats * math.log(2)",
            "cli/test_train.py::test_a_loss_per_byte_is_called_so",
        ),
    ),
    *of(
        "transformer_jax/config/lora.py",
        (
            "rsLoRA divides by the rank",
            "self.rank**0.5 if self.rslora else self.rank",
            "self.rank if self.rslora else self.rank",
            "models/test_lora.py::test_a_kernel_is_w_plus_scale_a_b",
        ),
    ),
    *of(
        "transformer_jax/config/mesh.py",
        (
            "rows are split over one of two axes",
            "return self.data * self.fsdp",
            "return max(self.data, self.fsdp)",
            "config/test_what_configs_refuse.py::test_what_follows_from_fields_is_theirs",
        ),
    ),
    *of(
        "transformer_jax/config/model.py",
        (
            "a feed-forward is twice as wide as the stream",
            "return 4 * self.d_model if self.d_ff is None",
            "return 2 * self.d_model if self.d_ff is None",
            "config/test_config.py::test_absent_sizes_follow_from_the_others",
        ),
        (
            "an order of norms is taken where there is no norm",
            'unread(self, rule, "norm_order")',
            "pass",
            "models/test_layers.py::test_without_a_norm_no_field_of_one_is_taken",
        ),
    ),
    *of(
        "transformer_jax/config/positions.py",
        (
            "a layer with a window pairs dimensions as by default",
            "Rope(base=self.window_base, dims=self.dims, pairing=self.pairing)",
            "Rope(base=self.window_base, dims=self.dims)",
            "config/test_config.py::test_the_pooler_and_the_rotation_of_a_layer_follow_from_the_others",
        ),
        (
            "biases of distances beside learned vectors have T5's reach",
            "T5Buckets(buckets=positions.buckets, max_distance=positions.max_distance)",
            "T5Buckets(buckets=positions.buckets)",
            "models/test_transformer.py::test_logits_equal_the_oracle",
        ),
    ),
    *of(
        "transformer_jax/corpus/documents.py",
        (
            "where a document begins is counted from the last block",
            "start, seen = start + tail, seen[tail:]",
            "seen = seen[tail:]",
            "cli/test_prepare.py::test_chunks_begin_at_the_same_documents_however_the_file_is_read",
        ),
    ),
    *of(
        "transformer_jax/corpus/folder.py",
        (
            "a read goes on past the end of a file",
            "into[done : done + self.shard_tokens - at]",
            "into[done : done + self.shard_tokens]",
            "cli/test_prepare.py::test_files_of_tokens_end_at_the_largest_size",
        ),
    ),
    *of(
        "transformer_jax/corpus/prepare.py",
        (
            "65536 ids take 32 bits",
            "tokenizer.vocab_size <= 2**16 else",
            "tokenizer.vocab_size < 2**16 else",
            "cli/test_prepare.py::test_65536_ids_fit_into_16_bits_and_one_more_does_not",
        ),
        (
            "a document ends a token late",
            "dtype=np.int64) - 1\n",
            "dtype=np.int64)\n",
            "cli/test_prepare.py::test_documents_come_back_in_order_each_in_one_part",
        ),
    ),
    *of(
        "transformer_jax/decoding/batch_rows.py",
        (
            "a row past the end is written over the last",
            'x.at[rows].set(y, mode="drop")',
            'x.at[rows].set(y, mode="clip")',
            "decoding/test_generation.py::test_rows_of_a_state_are_gathered_put_and_chosen",
        ),
    ),
    *of(
        "transformer_jax/decoding/beams.py",
        (
            "the same text of two groups is a result twice",
            "before = np.tril(np.ones(same.shape[1:], bool), -1)[None]",
            "before = np.tril(np.ones(same.shape[1:], bool), -2)[None]",
            "decoding/test_beams.py::test_narrow_beams_are_those_of_plain_python",
        ),
    ),
    *of(
        "transformer_jax/decoding/arguments.py",
        (
            "a row that gets no token reads its prompt but the last",
            "numpy.maximum(limits, 1) - 1",
            "limits - 1",
            "decoding/test_generation.py::test_a_prompt_and_what_is_read_after_it_must_fit_into_the_cache",
        ),
    ),
    *of(
        "transformer_jax/decoding/generation.py",
        (
            "a row goes on for a token after its limit",
            "active = active & (count < decode_state.limits)",
            "active = active & (count <= decode_state.limits)",
            "decoding/test_generation.py::test_limits_below_num_tokens_end_their_rows_alone",
        ),
        (
            "every token is drawn with the row's own key",
            "keys = jax.vmap(jax.random.fold_in)(decode_state.keys, decode_state.count)",
            "keys = decode_state.keys",
            "decoding/test_decode.py::test_each_token_draws_with_the_key_folded_with_its_number",
        ),
        (
            "the logits of a prompt read in chunks are those of its last chunk",
            "here = (offset >= 0) & (offset < chunk)",
            "here = offset < chunk",
            "decoding/test_decode.py::test_prefill_returns_the_logits_after_each_rows_last_token "
            "decoding/test_decode.py::test_chunks_of_the_prompt_change_nothing",
        ),
    ),
    *of(
        "transformer_jax/decoding/logit_processors.py",
        (
            "a sequence is not banned after the shortest text that begins it",
            "(history.length >= size - 1)",
            "(history.length > size - 1)",
            "decoding/test_logit_processors.py::test_a_sequence_is_banned_from_the_first_text_on_that_is_its_beginning",
        ),
        (
            "an n-gram may end after the text",
            "again = at < length[:, None]",
            "again = at <= length[:, None]",
            "decoding/test_logit_processors.py::test_processors_follow_their_rule",
        ),
        (
            "a penalty raises logits below 0",
            "jnp.where(logits > 0, logits / self.p, logits * self.p)",
            "logits / self.p",
            "decoding/test_logit_processors.py::test_processors_follow_their_rule",
        ),
        (
            "one token too many is forced",
            "jnp.where((history.new < count)[:, None], forced, logits)",
            "jnp.where((history.new <= count)[:, None], forced, logits)",
            "decoding/test_logit_processors.py::test_processors_follow_their_rule",
        ),
        (
            "the first new token does not count",
            "counted & (at >= self.prompt[:, None])",
            "counted & (at > self.prompt[:, None])",
            "decoding/test_logit_processors.py::test_processors_follow_their_rule",
        ),
    ),
    *of(
        "transformer_jax/decoding/samplers.py",
        (
            "the entropy has the other sign",
            "-jnp.abs(below - mean))",
            "-jnp.abs(below + mean))",
            "decoding/test_samplers.py::test_kept_tokens_are_those_of_the_rule",
        ),
        (
            "of equal logits one too few is kept",
            "jnp.cumsum(equal, axis=-1) <= room",
            "jnp.cumsum(equal, axis=-1) < room",
            "decoding/test_samplers.py::test_edges_keep_what_they_should",
        ),
    ),
    *of(
        "transformer_jax/models/flops.py",
        (
            "the query itself is counted twice in a two-sided window",
            "return before + after - length",
            "return before + after",
            "training/test_plan.py::test_operations_of_every_kind_are_counted_one_by_one",
        ),
    ),
    *of(
        "transformer_jax/models/functional.py",
        (
            "dropout keeps what it should drop",
            "~jax.random.bits(key, x.shape, jnp.uint32) >= jnp.uint32(threshold(rate))",
            "jax.random.bits(key, x.shape, jnp.uint32) <= jnp.uint32(threshold(rate))",
            "models/test_layers.py::test_dropout_scales_what_it_keeps",
        ),
    ),
    *of(
        "transformer_jax/models/ops.py",
        (
            "a norm adds eps to the root",
            "jax.lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + eps)",
            "1 / (jnp.sqrt((y * y).mean(axis=-1, keepdims=True)) + eps)",
            "models/test_layers.py::test_norms_equal_their_formulas "
            "models/test_layers.py::test_a_constant_vector_has_a_finite_norm_and_gradient",
        ),
    ),
    *of(
        "transformer_jax/models/block.py",
        (
            "queries and keys are multiplied by what their norm stores",
            "setattr(self, name, norm_scale(self, name, cfg, *shape))",
            "setattr(self, name, self.param(name, nn.initializers.ones, shape))",
            "models/test_layers.py::test_queries_and_keys_are_normalised_with_the_configs_eps",
        ),
        (
            "a parallel branch reads what the one before it gives",
            "read = before if cfg.is_parallel else x",
            "read = x",
            "models/test_places.py::test_parallel_branches_read_the_stream_before_the_block",
        ),
    ),
    *of(
        "transformer_jax/models/ops.py",
        (
            "an id below 0 reads a row from the end",
            "    ids = jnp.where(ids < 0, table.shape[0], ids)\n",
            "",
            "models/test_layers.py::test_an_id_outside_the_table_gives_nan_and_never_another_row",
        ),
    ),
    *of(
        "transformer_jax/models/places.py",
        (
            "an edit in a scan is of every block",
            "jnp.where(here, changed, value)",
            "changed",
            "models/test_places.py::test_an_edit_of_one_block_is_of_that_block_alone",
        ),
        (
            "a place that is edited is captured as it was",
            "            value = changed\n        if name",
            "            if name in self.capture:\n"
            "                self.captured.setdefault(name, value)\n"
            "                continue\n"
            "            value = changed\n        if name",
            "models/test_places.py::test_an_edit_of_one_block_is_of_that_block_alone",
        ),
        (
            "every block of a scan gives what the first one captured",
            "scanned[at[2]][:, int(at[1])]",
            "scanned[at[2]][:, 0]",
            "models/test_places.py::test_every_place_has_its_shape_and_looped_and_scanned_have_the_same_values",
        ),
        (
            "a scan carries what its last block captured",
            "jnp.where(layer == int(at[1]), captured[at[2]], sparse[name])",
            "captured[at[2]]",
            "models/test_places.py::test_a_scan_returns_the_blocks_that_are_asked_for",
        ),
    ),
    *of(
        "transformer_jax/models/lora.py",
        (
            "adapters of a scanned stack lie before its layers",
            "jnp.stack(leaves, axis=int(_is_scanned(path_name(path))))",
            "jnp.stack(leaves, axis=0)",
            "models/test_adapters.py::test_each_row_of_a_batch_uses_its_own_adapter",
        ),
        (
            "taking adapters out adds them again",
            'path[-1].key == "b" else leaf',
            'path[-1].key in "ab" else leaf',
            "models/test_adapters.py::test_unmerging_comes_back_within_two_roundings",
        ),
        (
            "adapters are added unscaled",
            "delta = config.scale * jnp.matmul(",
            "delta = jnp.matmul(",
            "models/test_lora.py::test_a_kernel_is_w_plus_scale_a_b",
        ),
    ),
    *of(
        "transformer_jax/lectures/ngram.py",
        (
            "a search among words takes a step too few",
            "steps = (self.config.vocab_size + 1).bit_length()",
            "steps = self.config.vocab_size.bit_length() - 1",
            "lectures/test_ngram.py::test_every_word_is_found_where_all_are_in_use",
        ),
        (
            "the discount counts what occurs twice once",
            "discount = once / (once + 2 * twice)",
            "discount = once / (once + twice)",
            "lectures/test_ngram.py::test_what_is_discounted_goes_to_the_shorter_context",
        ),
        (
            "a beginning is predicted",
            "counts = np.where(word == size - 1, 0, counts)",
            "counts = np.asarray(counts)",
            "lectures/test_ngram.py::test_probabilities_are_those_of_the_formula_after_every_context",
        ),
    ),
    *of(
        "transformer_jax/models/positions.py",
        (
            "yarn's bounds are rounded inwards",
            "fast, slow = math.floor(fast), math.ceil(slow)",
            "fast, slow = math.ceil(fast), math.floor(slow)",
            "models/test_positions.py::test_frequencies_match_their_paper "
            "models/test_positions.py::test_frequencies_of_released_checkpoints",
        ),
        (
            "learned positions begin at the table's first row",
            "row = jnp.maximum(positions, 0) + offset",
            "row = jnp.maximum(positions, 0)",
            "models/test_positions.py::test_learned_positions_are_rows_and_padding_is_zero",
        ),
        (
            "Shaw's vectors are those of the distance to the query",
            "-clip, clip)[:, None] + clip",
            "-clip, clip)[:, None] * -1 + clip",
            "models/test_positions.py::test_shaw_matches_loops_with_gradients",
        ),
    ),
    *of(
        "transformer_jax/models/quantized.py",
        (
            "logits of a quantised table lose their bias",
            "return ops.logits(x, table.astype(x.dtype), bias)",
            "return ops.logits(x, table.astype(x.dtype), None)",
            "models/test_quantized.py::test_logits_of_a_table_in_8_bits_have_their_bias",
        ),
        (
            "the two values of a byte are read the other way round",
            "jnp.stack([low, high], axis=-2)",
            "jnp.stack([high, low], axis=-2)",
            "models/test_quantized.py::test_a_weight_is_off_by_half_a_step_at_most",
        ),
    ),
    *of(
        "transformer_jax/lectures/recent_tokens.py",
        (
            "padding counts in a state's length",
            "length = state.length + read\n",
            "length = state.length + tokens.shape[1]\n",
            "lectures/test_recent_tokens.py::test_in_any_chunks_with_padding_anywhere_equals_the_whole",
        ),
        (
            "a window reaches into the document before",
            "jnp.where(same, line[rows, index], -1)",
            "line[rows, index]",
            "lectures/test_recent_tokens.py::test_packed_documents_are_read_as_if_alone",
        ),
    ),
    *of(
        "transformer_jax/lectures/recurrent.py",
        (
            "decoding consumes the caller's marks of padding",
            "valid = jnp.array(valid, copy=True)",
            "valid = jnp.asarray(valid)",
            "lectures/test_recurrent.py::test_decoding_consumes_the_state_and_none_of_the_callers_arrays",
        ),
        (
            "read from its end, a document begins where it begins",
            "ends = first_tokens(number_documents(segments[:, ::-1]), valid[:, ::-1])[:, ::-1]",
            "ends = starts",
            "lectures/test_recurrent.py::test_a_tagger_reads_each_document_from_both_ends",
        ),
    ),
    *of(
        "transformer_jax/lectures/recurrent.py",
        (
            "the state of packed rows has read all documents",
            "state = replace(state, length=read)",
            "pass",
            "lectures/test_recurrent.py::test_packed_documents_are_read_as_if_alone",
        ),
    ),
    *of(
        "transformer_jax/models/streaming.py",
        (
            "a row of padding counts as beside its chunk",
            "(first % self.chunk != 0) & (p >= 0).any(axis=1)",
            "first % self.chunk != 0",
            "models/test_streaming.py::test_a_row_of_padding_alone_is_at_no_place_in_a_chunk",
        ),
        (
            "each layer's window counts the token once more",
            "return 1 + sum(window - 1 for window in windows",
            "return 1 + sum(window for window in windows",
            "models/test_streaming.py::test_the_receptive_field_is_exact",
        ),
        (
            "a chunk sees a frame less of its history",
            "(kept | (after >= -self.history))",
            "(kept | (after > -self.history))",
            "models/test_streaming.py::test_a_chunk_sees_itself_and_its_history",
        ),
        (
            "a stream moves back by parts of a chunk",
            "step = math.lcm(state.capacity, multiple)",
            "step = state.capacity",
            "models/test_streaming.py::test_a_chunked_stream_moves_back_by_whole_chunks",
        ),
    ),
    *of(
        "transformer_jax/lectures/convolution.py",
        (
            "the vector that a layer adds to is a token too old",
            "x = x[:, cfg.kernel_size - 1 :] + value",
            "x = x[:, : value.shape[1]] + value",
            "lectures/test_recent_tokens.py::test_a_pass_matches_the_formula",
        ),
    ),
    *of(
        "transformer_jax/models/transformer.py",
        (
            "the mean that a pooler reads counts padding",
            "x = total / jnp.maximum(valid.sum(axis=1), 1)[:, None]",
            "x = total / x.shape[1]",
            "models/test_transformer.py::test_classes_of_a_transform_equal_the_oracle",
        ),
    ),
    *of(
        "transformer_jax/lectures/window.py",
        (
            "before the beginning stands token 0",
            "vectors = jnp.where(begins, self.begin[None, None, None], vectors)",
            "vectors = jnp.where(begins & False, self.begin[None, None, None], vectors)",
            "lectures/test_recent_tokens.py::test_a_pass_matches_the_formula",
        ),
    ),
    *of(
        "transformer_jax/pretrained/families/decoder_keys.py",
        (
            "yarn's multiplier has no scale",
            "0.1 * scale * math.log(factor) + 1.0",
            "0.1 * math.log(factor) + 1.0",
            "pretrained/test_load.py::test_a_stretched_rotation_is_read",
        ),
        (
            "a stretched length is written as the trained one",
            "round(rope.original_len * rope.factor)",
            "rope.original_len",
            "pretrained/test_load.py::test_others_read_the_length_to_which_a_rotation_was_stretched",
        ),
    ),
    *of(
        "transformer_jax/pretrained/families/bart.py",
        (
            "every family has its norms after the branches",
            'Fixed(kind="encoder-decoder", norm_order=order)',
            'Fixed(kind="encoder-decoder", norm_order="post")',
            "pretrained/test_seq2seq_folders.py"
            "::test_norms_before_the_branches_and_after_the_stacks",
        ),
        (
            "an M2M-100 counts positions from its padding token on",
            'first, base = keys.integer("pad_token_id", 1, least=0) + 1, 10_000',
            'first, base = keys.integer("pad_token_id", 1, least=0), 10_000',
            "pretrained/test_load.py::test_keys_that_are_missing_have_the_defaults_of_transformers",
        ),
    ),
    *of(
        "transformer_jax/pretrained/families/other_keys.py",
        (
            "an albert of several groups is read as one of one",
            "dict(num_hidden_groups=[1], inner_group_num=[1])",
            "dict(num_hidden_groups=[1, 2], inner_group_num=[1])",
            "pretrained/test_family_folders.py"
            "::test_what_would_change_the_numbers_is_refused_by_name",
        ),
    ),
    *of(
        "transformer_jax/pretrained/families/nomic_bert.py",
        (
            "the older style's base of a rotation is not read",
            "read_rope(keys, fields, default=base)",
            "read_rope(keys, fields, default=BASE)",
            "pretrained/test_family_folders.py::test_both_styles_of_nomic_bert_mean_the_same",
        ),
    ),
    *of(
        "transformer_jax/pretrained/gguf.py",
        (
            "gate and up of a gpt-oss stand one after the other",
            "np.stack(tensors, axis=-1).reshape(*tensors[0].shape[:-1], -1)",
            "np.concatenate(tensors, axis=-1)",
            "pretrained/test_gguf_gpt_oss.py::test_experts_of_a_gpt_oss_in_mxfp4_are_what_they_were",
        ),
    ),
    *of(
        "transformer_jax/pretrained/families/table.py",
        (
            "rows that take turns are written one parameter after the other",
            "return np.concatenate(runs, axis=1).reshape(-1, *rest)",
            "return np.concatenate(pieces)",
            "pretrained/test_family_folders.py"
            "::test_rows_that_take_turns_are_cut_and_joined_as_numpy_does",
        ),
    ),
    *of(
        "transformer_jax/pretrained/peft.py",
        (
            "rows of kernels that take turns are read as they lie",
            "b = b[np.argsort(kernels.rows([found[kernel][1] for kernel in kernels]))]",
            "b = b[np.arange(len(b))]",
            "models/test_lora.py::test_kernels_whose_rows_take_turns_are_written_so_and_read_back",
        ),
    ),
    *of(
        "transformer_jax/pretrained/sentences.py",
        (
            "a mean counts padding",
            "kept.sum(axis=1) / jnp.maximum(valid.sum(axis=1), 1)[:, None]",
            "kept.mean(axis=1)",
            "pretrained/test_sentences.py::test_only_valid_tokens_are_pooled",
        ),
    ),
    *of(
        "transformer_jax/decoding/writer.py",
        (
            "of stop strings that end together the shortest goes",
            "self.pending[: -max(map(len, matches))]",
            "self.pending[: -min(map(len, matches))]",
            "decoding/test_completion.py::test_of_stop_strings_that_end_together_the_longest_goes",
        ),
        (
            "text that is held back is lost at the end",
            "return text if stopped else text + self.matcher.pending",
            "return text",
            "decoding/test_completion.py::test_the_text_does_not_depend_on_where_tokens_end",
        ),
        (
            "a token after a broken character starts where that one does",
            "self.start = self.length + broken",
            "self.start = self.length",
            "decoding/test_completion.py::test_a_token_starts_at_its_first_character",
        ),
    ),
    *of(
        "transformer_jax/server/protocol.py",
        (
            "parts of characters have one name",
            'return "bytes:" + "".join(f"\\\\x{byte:02x}" for byte in piece)',
            'return "bytes:"',
            "server/test_protocol.py::test_the_parts_of_a_stream_join_to_the_whole_answer",
        ),
    ),
    *of(
        "transformer_jax/text/scores.py",
        (
            "the first label of a score is left out",
            "labels[: first - 1] = IGNORE",
            "labels[:first] = IGNORE",
            "text/test_language_model.py::test_a_score_is_the_sum_of_log_probabilities_by_definition",
        ),
        (
            "windows of a long text count some labels twice",
            "here[done - start : end - start] = tokens[start:end], labels[done:end]",
            "here[: end - start] = tokens[start:end], labels[start:end]",
            "text/test_language_model.py::test_windows_have_each_label_once_after_enough_tokens",
        ),
    ),
    *of(
        "transformer_jax/tokenizers/special.py",
        (
            "targets of a translator have the language of the source around them",
            "tuple(language if i in named else i for i in ids)",
            "tuple(i for i in ids)",
            "training/test_rows_of_families.py"
            "::test_a_translator_reads_one_language_and_has_targets_of_another",
        ),
        (
            "special tokens begin at the last id of the text's",
            "name: self.base.vocab_size + i for i, name",
            "name: self.base.vocab_size - 1 + i for i, name",
            "training/test_task_data.py::test_special_tokens_stand_after_the_text_s_and_for_no_text",
        ),
    ),
    *of(
        "transformer_jax/tokenizers/trained.py",
        (
            "rare words come first",
            "key=lambda word: (-found[word], word)",
            "key=lambda word: (found[word], word)",
            "training/test_task_data.py::test_words_come_back_with_one_space_between_them",
        ),
        (
            "a character that is not known is the nearest one",
            "wrong = np.flatnonzero(known[ids] != points)",
            "wrong = np.flatnonzero(known[ids] < points)",
            "training/test_data.py::test_a_character_beside_any_known_one_is_unknown",
        ),
    ),
    *of(
        "transformer_jax/training/data.py",
        (
            "windows begin at a text's last token",
            "np.arange(0, tokens - 1, length, dtype=np.int32)",
            "np.arange(0, tokens, length, dtype=np.int32)",
            "training/test_data.py::test_consecutive_windows_cover_every_label_once",
        ),
    ),
    *of(
        "transformer_jax/training/losses.py",
        (
            "the slope of z-loss is half of it",
            "scale = scale * (1 + 2 * terms.z * lse)",
            "scale = scale * (1 + terms.z * lse)",
            "training/test_losses.py::test_loss_and_gradients_match_the_formula",
        ),
        (
            "smoothing leaves the label itself out",
            "rest = terms.smoothing / vocab",
            "rest = terms.smoothing / (vocab - 1)",
            "training/test_losses.py::test_loss_and_gradients_match_the_formula",
        ),
        (
            "a hidden state that does not count enters the table's gradient",
            "hidden = jnp.where(counts[..., None], hidden, 0)",
            "hidden = jnp.asarray(hidden)",
            "training/test_losses.py::test_hidden_states_that_do_not_count_change_nothing",
        ),
    ),
    *of(
        "transformer_jax/training/planning/memory.py",
        (
            "gradients take no memory",
            "needed = parameters + optimizer + gradients",
            "needed = parameters + optimizer",
            "training/test_plan.py::test_a_state_is_refused_where_its_gradients_have_no_room",
        ),
    ),
    *of(
        "transformer_jax/training/optimizers.py",
        (
            "a frozen name is any beginning of a path",
            'f"{name}/".startswith(f"{part.strip(\'/\')}/")',
            "name.startswith(part.strip('/'))",
            "training/test_optimizers.py::test_a_frozen_name_is_whole_parts_of_a_path",
        ),
        (
            "frozen gradients count in the clipped norm",
            "optax.chain(*last, optax.clip_by_global_norm(config.clip_norm))",
            "optax.chain(optax.clip_by_global_norm(config.clip_norm), *last)",
            "training/test_optimizers.py::test_the_gradient_of_what_is_frozen_changes_no_update",
        ),
        (
            "all layers of a scanned stack share Adafactor's clipping",
            "of_one = tuple(range(first, grad.ndim))",
            "of_one = tuple(range(grad.ndim))",
            "training/test_optimizers.py::test_adafactor_takes_each_expert_of_each_layer_as_a_parameter_of_its_own",
        ),
        (
            "weight decay shrinks biases of heads",
            'leaf.ndim - layers >= 2 and not names[-1].endswith(("bias", "scale", "sinks"))',
            "leaf.ndim - layers >= 2",
            "training/test_training.py::test_weight_decay_leaves_the_same_parameters_alone_when_layers_are_stacked",
        ),
        (
            "after its warm-up the rate falls from the first step on",
            "jnp.sqrt((warmup + 1) / (count + warmup + 1))",
            "jnp.sqrt((warmup + 1) / (count + 1))",
            "training/test_schedules.py::test_a_schedule_rises_in_a_line_and_then_follows_its_formula",
        ),
        (
            "the average of ScheduleFree is its fast sequence",
            "(y - (1 - state.b1) * z) / state.b1",
            "(y + (1 - state.b1) * z) / state.b1",
            "training/test_optimizers.py::test_schedule_free_is_evaluated_at_the_average_of_its_steps",
        ),
    ),
    *of(
        "transformer_jax/training/planning/plan.py",
        (
            "gradients are planned in the parameters' dtype",
            'trained if config.param_dtype == "float32" else 2 * trained',
            "trained",
            "training/test_plan.py::test_gradients_are_planned_in_float32_whatever_the_parameters",
        ),
        (
            "decoding writes its parameters",
            "written = resident if self.cache == 0 else 0",
            "written = resident",
            "training/test_plan.py::test_a_table_that_has_rows_looked_up_is_not_read_whole",
        ),
    ),
    *of(
        "transformer_jax/training/preference.py",
        (
            "a pair of equal rewards is right",
            "found > 0, False)",
            "found >= 0, False)",
            "training/test_losses_of_a_table.py::test_preferences_are_judged_by_the_formula",
        ),
        (
            "the reference has a gradient",
            "initial = jax.lax.stop_gradient(log_probs(reference, batch, None))",
            "initial = log_probs(reference, batch, None)",
            "training/test_preference.py::test_at_the_start_it_is_log_2_and_pushes_the_two_apart",
        ),
    ),
    *of(
        "transformer_jax/training/rows.py",
        (
            "a packed prefix is written from the row's first token on",
            "prefix[row, here] = example.prefix",
            "prefix[row, :size] = example.prefix",
            "training/test_rows.py::test_a_prefix_of_a_packed_example_is_its_first_tokens_wherever_it_lies",
        ),
        (
            "an example that fits exactly begins a row",
            "if room >= size), len(rooms))",
            "if room > size), len(rooms))",
            "training/test_rows.py::test_an_example_fills_exactly_the_room_that_is_left",
        ),
        (
            "rows that are none have labels",
            'FILL = {"labels": IGNORE}',
            'FILL = {"label": IGNORE}',
            "training/test_rows.py::test_an_evaluation_reads_every_row_once_and_pads_the_last_batch_with_nothing",
        ),
        (
            "every epoch has the order of the first",
            "order = _shuffled(seed, epoch, bucket + 1, self.counts[bucket])",
            "order = _shuffled(seed, 0, bucket + 1, self.counts[bucket])",
            "training/test_rows.py::test_epochs_of_one_step_have_orders_of_their_own",
        ),
    ),
    *of(
        "transformer_jax/training/spikes.py",
        (
            "a loss that stands out counts for the next",
            "if finite and not high:",
            "if finite:",
            "training/test_watching.py::test_a_loss_stands_out_above_the_median",
        ),
    ),
    *of(
        "transformer_jax/training/step.py",
        (
            "micro-batches share a key",
            "differentiate(params, batch, jax.random.fold_in(key, index), frozen)",
            "differentiate(params, batch, jax.random.fold_in(key, 0 * index), frozen)",
            "training/test_training.py::test_dropout_draws_anew_at_each_step_and_in_each_micro_batch",
        ),
        (
            "micro-batches count alike, whatever tokens they have",
            "return mean * weight, weight\n",
            "return mean * (weight > 0), 1.0 * (weight > 0)\n",
            "training/test_training.py::test_micro_batches_weighted_by_tokens_are_one_big_batch",
        ),
        (
            "the last token of a text has a label",
            "jnp.where(index < last, labels, IGNORE)",
            "jnp.where(index <= last, labels, IGNORE)",
            "training/test_training.py::test_windows_predict_the_next_token_and_nothing_past_the_end",
        ),
        (
            "an average moves by the decay",
            "incremental_update(new, average, 1 - ema_decay)",
            "incremental_update(new, average, ema_decay)",
            "training/test_optimizers.py::test_the_average_follows_its_formula_and_waits_where_a_step_is_rejected",
        ),
        (
            "a gradient that is not finite is taken",
            "accepted = jnp.isfinite(mean) & jnp.isfinite(norm)",
            "accepted = jnp.isfinite(mean)",
            "training/test_training.py::test_a_step_that_is_not_finite_changes_nothing",
        ),
    ),
    *of(
        "transformer_jax/models/layers.py",
        (
            "a bias that the config has no place for is left out",
            """        refuse_surplus(self)
        x = x.astype(cfg.dtype)""",
            """        x = x.astype(cfg.dtype)""",
            "models/test_surplus.py::test_a_parameter_without_a_place_is_refused_by_its_name_and_the_config_s_field",
        ),
    ),
    *of(
        "transformer_jax/training/tasks/masked.py",
        (
            "every batch of an evaluation hides the places of the first",
            "counter=1 + first * blocks",
            "counter=1",
            "training/test_task_data.py::test_what_is_hidden_of_a_window_does_not_depend_on_the_batch_around_it",
        ),
        (
            "an evaluation leaves its last window out",
            "np.arange(0, len(self.data.val) - length + 1, length, dtype=np.int32)",
            "np.arange(0, len(self.data.val) - length, length, dtype=np.int32)",
            "training/test_task_data.py::test_an_evaluation_of_hidden_tokens_covers_every_whole_window",
        ),
        (
            "hidden tokens that stay become random ones",
            "(how < replaced + task.random), random, hidden)",
            "(how < replaced + 1), random, hidden)",
            "training/test_task_data.py::test_hidden_tokens_have_the_shares_that_the_task_names",
        ),
    ),
    *of(
        "transformer_jax/training/tasks/metrics.py",
        (
            "an equal item costs a replacement",
            "before[j - 1] + (item != other))",
            "before[j - 1] + 1)",
            "training/test_task_data.py::test_edit_distance_is_that_of_its_definition",
        ),
        (
            "F1 counts classes that do not occur",
            "counted = total > 0",
            "counted, total = total >= 0, np.maximum(total, 1)",
            "training/test_task_data.py::test_f1_is_the_mean_over_classes_that_occur",
        ),
    ),
    *of(
        "transformer_jax/inside/heads.py",
        (
            "an induction head attends to the token after the next one",
            "score(period - 1, period))",
            "score(period - 2, period))",
            "inside/test_heads.py::test_heads_that_attend_to_one_kind_of_token_have_a_score_of_1",
        ),
        (
            "a rollout has no share of the stream itself",
            "mixed = weights.astype(jnp.float32).mean(axis=2) + jnp.eye(T)[None, None]",
            "mixed = weights.astype(jnp.float32).mean(axis=2)",
            "inside/test_heads.py::test_a_rollout_multiplies_the_layers_and_its_rows_sum_to_1",
        ),
    ),
    *of(
        "transformer_jax/inside/gradients.py",
        (
            "points of a path are taken from its first half alone",
            "(nodes + 1) / 2, x1.dtype",
            "(nodes + 1) / 4, x1.dtype",
            "inside/test_heads.py::test_integrated_gradients_of_a_square_are_its_difference",
        ),
    ),
    *of(
        "transformer_jax/inside/patching.py",
        (
            "one token before the asked one is put in",
            "chosen = chosen & (jnp.arange(sizes[i]) == index[i]).reshape(shape)",
            "chosen = chosen & (jnp.arange(sizes[i]) == index[i] - 1).reshape(shape)",
            "inside/test_patching.py::test_one_token_of_the_logits_put_in_is_that_token_of_the_other_run",
        ),
        (
            "attribution patching has the sign of the other way",
            "(value.astype(jnp.float32) - own[name].astype(jnp.float32)) * slope",
            "(own[name].astype(jnp.float32) - value.astype(jnp.float32)) * slope",
            "inside/test_patching.py::test_one_token_of_the_logits_put_in_is_that_token_of_the_other_run",
        ),
    ),
    *of(
        "transformer_jax/inside/paths.py",
        (
            "branches on a path are held at the clean prompt",
            "own = apply(corrupted, capture=held)[1]",
            "own = apply(clean, capture=held)[1]",
            "inside/test_paths.py::test_the_direct_effect_of_the_embedding_is_its_share_of_the_logits",
        ),
    ),
    *of(
        "transformer_jax/inside/edits.py",
        (
            "a mean over tokens is one over rows",
            '{"tokens": (tokens,), "rows": (0,), ',
            '{"tokens": (0,), "rows": (tokens,), ',
            "inside/test_edits.py::test_an_edit_of_a_value_is_that_of_numpy",
        ),
        (
            "an edit of a token is one of the next",
            "(positions[..., None] == at[None, None])",
            "(positions[..., None] == at[None, None] + 1)",
            "inside/test_edits.py::test_an_edit_of_a_value_is_that_of_numpy",
        ),
    ),
    *of(
        "transformer_jax/inside/lens.py",
        (
            "the lens reads a stream without the last norm",
            'x = x if model.config.norm_order == "post" else stack.norm(x)',
            'x = x if model.config.norm_order != "post" else stack.norm(x)',
            "inside/test_lens.py::test_the_lens_of_the_embedding_is_its_norm_times_the_table",
        ),
        (
            "a part of a logit lacks the scale of the norm",
            "d = d * scale[None, None]",
            "d = d * jnp.ones_like(scale)[None, None]",
            "inside/test_lens.py::test_the_parts_sum_to_the_logit_and_to_the_difference[gpt2]",
        ),
        (
            "the other token's logit is added",
            "return first - rest[0] if rest else first",
            "return first + rest[0] if rest else first",
            "inside/test_lens.py::test_the_parts_sum_to_the_logit_and_to_the_difference[gpt2]",
        ),
    ),
    *of(
        "transformer_jax/inside/tuned_lens.py",
        (
            "the divergence of a lens is that of the other way",
            "(jnp.exp(log_p) * (log_p - log_q))",
            "(jnp.exp(log_q) * (log_q - log_p))",
            "inside/test_tuned_lens.py::test_logits_and_divergence_are_those_of_translated_streams",
        ),
    ),
    *of(
        "transformer_jax/inside/steering.py",
        (
            "the last token of a shorter text is its padding",
            "index == counts[:, None] - 1 if",
            "index == tokens.shape[1] - 1 if",
            "inside/test_steering.py::test_a_vector_of_the_embedding_is_that_of_the_tables",
        ),
    ),
    *of(
        "transformer_jax/inside/probes.py",
        (
            "the bias of a probe forgets the centre of its values",
            "return kernel, (mean - centre @ kernel)[0], mean",
            "return kernel, mean[0], mean",
            "inside/test_probes.py::test_a_probe_of_numbers_is_that_of_the_normal_equations[False]",
        ),
    ),
    *of(
        "transformer_jax/inside/hooks.py",
        (
            "the stream before a block is that after it",
            'f"block_{number - 1}/residual"',
            'f"block_{number}/residual"',
            "inside/test_hooks.py::test_places_of_hooks_have_the_values_that_hooks_see[gpt2]",
        ),
    ),
    *of(
        "transformer_jax/server/engine.py",
        (
            "an answer that a stop text ends keeps its slot",
            "self.batcher.drop(ticket)",
            "",
            "server/test_app.py::test_a_stop_text_ends_an_answer_before_it",
        ),
    ),
    *of(
        "transformer_jax/server/schemas.py",
        (
            "true is a number",
            """        return "boolean" in kinds
""",
            """        return True
""",
            "server/test_protocol.py::test_what_is_wrong_is_refused_in_a_line_that_names_it",
        ),
    ),
    *of(
        "transformer_jax/lectures/demos/rotations.py",
        (
            "a pair of sinusoids turns the other way",
            "angle = k * 10_000.0",
            "angle = -k * 10_000.0",
            "lectures/demos/test_demos.py::test_a_table_of_sinusoids_is_turned_by_an_offset",
        ),
    ),
)
