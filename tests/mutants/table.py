"""The mutants: one broken line of a product kernel each, and the test that notices.

When a kernel's line changes, its mutant follows (`line`), or is replaced by one of the new line.
"""

from __future__ import annotations

from tests.mutants.harness import Mutant

HYPER, KV, COMPRESS, ROPE = (f"tests/cuda/test_{name}.py::" for name in ("hyper", "kv", "compress", "rope"))
ENGRAM, TOPK, LINEAR, SAMPLE = (f"tests/cuda/test_{name}.py::" for name in ("engram", "topk", "linear", "sample"))
NORM, ROUTER, EXPERTS, LLOYD = (f"tests/cuda/test_{name}.py::" for name in ("norm", "router", "experts", "lloyd"))
ATTENTION, INDEX, DRAFT, ACCEPT = (f"tests/cuda/test_{n}.py::" for n in ("attention", "index", "draft", "accept"))

MUTANTS: tuple[Mutant, ...] = (
    # -- hyper.cu
    Mutant(
        "hyper-dots-barrier-removed",
        "hyper.cu",
        "    sync_block();\n    if (m > M) return;",
        "    if (m > M) return;",
        HYPER + "test_mixes_agree_with_float64",
    ),
    Mutant(
        "hyper-mix-epsilon-doubled",
        "hyper.cu",
        "sqrtf(sum_sq / (float)width + eps));\n    if (lane < S) pre",
        "sqrtf(sum_sq / (float)width + 2.0f * eps));\n    if (lane < S) pre",
        HYPER + "test_tiny_streams_see_epsilon",
    ),
    Mutant(
        "hyper-sinkhorn-one-step-less",
        "hyper.cu",
        "step < 2 * iters - 1",
        "step < 2 * iters - 2",
        HYPER + "test_specification_vectors",
    ),
    Mutant(
        "hyper-collapse-epsilon-doubled",
        "hyper.cu",
        "block_sum<kThreads>(sum_sq) / (float)width + eps",
        "block_sum<kThreads>(sum_sq) / (float)width + 2.0f * eps",
        HYPER + "test_collapse_is_a_norm_of_the_weighted_streams",
    ),
    Mutant(
        "hyper-expand-guard-off-by-one",
        "hyper.cu",
        "if (d >= width) return;",
        "if (d > width) return;",
        HYPER + "test_expand_sums_over_the_first_index",
    ),
    # -- engram.cu
    Mutant(
        "engram-dot-floor-ignored",
        "engram.cu",
        "fabsf(dot) < kDotFloor ?",
        "fabsf(dot) < 0.0f ?",
        ENGRAM + "test_a_small_dot_keeps_its_sign_and_meets_the_floor",
    ),
    Mutant(
        "engram-key-epsilon-doubled",
        "engram.cu",
        "sq_key / n + eps",
        "sq_key / n + 2.0f * eps",
        ENGRAM + "test_gate_is_within_the_rounding_bound",
    ),
    # -- kv.cu and kvrows.cuh
    Mutant(
        "window-epsilon-doubled",
        "kv.cu",
        "(float)HEAD_DIM + eps)",
        "(float)HEAD_DIM + 2.0f * eps)",
        KV + "test_rows_are_normed_and_turned_as_in_float64",
    ),
    Mutant(
        "window-ring-slot-off-by-one",
        "kv.cu",
        "(pos[row] % ring_rows)",
        "((pos[row] + 1) % ring_rows)",
        KV + "test_the_ring_holds_the_newest_rows",
    ),
    Mutant(
        "q8-floor-of-the-maximum-dropped",
        "kvrows.cuh",
        "fmaxf(amax, 1e-4f)",
        "fmaxf(amax, 1e-30f)",
        KV + "test_quantiser_edges_reach_the_codes",
    ),
    # -- compress.cu
    Mutant(
        "compress-partial-gates-for-values",
        "compress.cu",
        "load16(x, partial, slot);",
        "load16(x, partial, gates + slot);",
        COMPRESS + "test_any_chunking_leaves_the_same_bits",
    ),
    Mutant(
        "compress-tail-one-slot-late",
        "compress.cu",
        "(pos[row] % slots)",
        "((pos[row] + 1) % slots)",
        COMPRESS + "test_partial_keeps_the_newest_positions",
    ),
    # -- rope.cu
    Mutant(
        "rope-position-off-by-one",
        "rope.cu",
        "(float)(i32)pos[blockIdx.x]",
        "(float)(i32)(pos[blockIdx.x] + 1)",
        ROPE + "test_queries_turn_as_in_float64",
    ),
    # -- topk.cu
    Mutant(
        "topk-all-ties-kept",
        "topk.cu",
        "const u32 word = ballot(kept);",
        "const u32 word = ballot(v >= threshold && v);",
        TOPK + "test_blocks_are_the_best_with_the_last_forced",
    ),
    Mutant(
        "topk-counts-barrier-removed",
        "topk.cu",
        "sm.equal[warp] = equal;\n    sync_block();",
        "sm.equal[warp] = equal;",
        TOPK + "test_rows_are_the_best_rising_and_padded",
    ),
    # -- sample.cu, accept.cu and what they share
    Mutant(
        "sample-barrier-removed",
        "truncate.cuh",
        "        sync_block();\n        if (threadIdx.x < 32) {",
        "        if (threadIdx.x < 32) {",
        SAMPLE + "test_greedy_takes_the_lowest_of_equals",
    ),
    Mutant(
        "accept-counts-past-the-first-that-falls",
        "accept.cu",
        "__ffs((int)~ballot(stands)) - 1",
        "__popc(ballot(stands))",
        ACCEPT + "test_temperature_zero_takes_the_argmax_whatever_the_draft",
    ),
    Mutant(
        "sample-carry-dropped",
        "truncate.cuh",
        "(u32)(weight >> 32) + (u32)(old + mine < old);",
        "(u32)(weight >> 32);",
        SAMPLE + "test_truncated_sets_are_exact",
    ),
    # -- norm.cu
    Mutant(
        "norm-epsilon-doubled",
        "norm.cu",
        "(float)width + eps",
        "(float)width + 2.0f * eps",
        NORM + "test_error_is_within_the_rounding_bound",
    ),
    Mutant(
        "norm-does-not-wait",
        "norm.cu",
        "    grid_wait();\n    grid_release();\n",
        "",
        NORM + "test_error_is_within_the_rounding_bound",
    ),
    # -- router.cu
    Mutant(
        "route-warp-barrier-removed",
        "router.cu",
        "    sync_warp();\n",
        "",
        ROUTER + "test_picks_and_weights",
    ),
    Mutant(
        "route-epsilon-of-the-sum",
        "router.cu",
        "sum + 1e-20f",
        "sum + 1e-10f",
        ROUTER + "test_tiny_scores_are_still_normalised",
    ),
    # -- experts
    Mutant(
        "experts-codebook-read-before-its-wait",
        "experts_step.cu",
        "    cp_async_wait<0>();\n",
        "",
        EXPERTS + "test_one_row",
        at=0,
    ),
    Mutant(
        "experts-plan-last-item-too-long",
        "experts_plan.cu",
        "min(cap, n - i * cap)",
        "cap",
        EXPERTS + "test_plan",
    ),
    Mutant(
        "experts-plan-forgets-the-passes-before",
        "experts_plan.cu",
        "total[0] += (u32)n",
        "total[0] = (u32)n",
        EXPERTS + "test_plan",
    ),
    Mutant(
        "experts-prefill-barrier-after-the-reads-removed",
        "experts_prefill.cu",
        "sync_block();  // the next tile's weights overwrite these",
        "",
        EXPERTS + "test_prefill_on_tensor_cores",
    ),
    Mutant(
        "experts-lets-the-next-start-too-early",
        "experts_step.cu",
        "    grid_wait();\n    grid_release();\n",
        "    grid_release();\n    grid_wait();\n",
        EXPERTS + "test_one_row",
        at=0,
    ),
    # -- accept.cu
    Mutant(
        "accept-next-positions-stand-still",
        "accept.cu",
        "next_pos[lane] = at + lane",
        "next_pos[lane] = at",
        ACCEPT + "test_the_next_pass_finds_its_ids_and_positions",
    ),
    # -- linear_step.cu
    Mutant(
        "linear-warp-beyond-the-last-row-does-not-wait",
        "linear_step.cu",
        "        grid_wait();\n        return;",
        "        return;",
        LINEAR + "test_a_step_is_within_its_rounding_bound",
    ),
    Mutant(
        "linear-split-barrier-removed",
        "linear_step.cu",
        "        sync_block();\n        if (warp == 0",
        "        if (warp == 0",
        LINEAR + "test_a_step_is_within_its_rounding_bound",
    ),
    # -- attention.cu and attention_mma.cu
    Mutant(
        "attention-sink-left-out",
        "attention.cu",
        "l + exp_f(sinks[head] - m)",
        "l",
        ATTENTION + "test_outputs_agree_with_float64[a sink above every score-step]",
    ),
    Mutant(
        "attention-output-turned-forwards",
        "attention.cu",
        "p, freq, -1.0f)",
        "p, freq, 1.0f)",
        ATTENTION + "test_outputs_agree_with_float64[several splits-step]",
    ),
    Mutant(
        "attention-mma-barrier-after-the-reads-removed",
        "attention_mma.cu",
        "sync_block();  // keys, weights and factors have been read",
        "",
        ATTENTION + "test_tensor_cores_agree_with_float64",
    ),
    # -- index.cu
    Mutant(
        "index-queries-overwritten",
        "index.cu",
        "if (row > row0) sync_block();",
        "",
        INDEX + "test_a_score_does_not_depend_on_the_rows_beside_it",
    ),
    Mutant(
        "index-negative-dots-counted",
        "index.cu",
        "fmaxf(dot, 0.0f)",
        "dot",
        INDEX + "test_negative_weights_and_dots",
    ),
    Mutant(
        "index-mma-barrier-between-rows-removed",
        "index_mma.cu",
        "if (row > row0) sync_block();",
        "if (row > n_rows) sync_block();",
        INDEX + "test_tensor_cores_give_the_same_bits",
    ),
    # -- lloyd.cu
    Mutant("lloyd-carry-lost", "lloyd.cu", "old + lo < old", "0u", LLOYD + "test_the_carry_goes_up"),
    # -- draft.cu
    Mutant(
        "draft-tap-forgets-a-stream",
        "draft.cu",
        "for (int c = 1; c < S; c++) sum +=",
        "for (int c = 2; c < S; c++) sum +=",
        DRAFT + "test_a_tap_is_the_mean_of_the_streams_in_its_columns",
    ),
    Mutant(
        "draft-bias-stops-before-the-last",
        "draft.cu",
        "if (v < vocab) logits[v] = sum[i];",
        "if (v + 1 < vocab) logits[v] = sum[i];",
        DRAFT + "test_a_bias_is_one_addition",
    ),
    Mutant(
        "draft-argmax-takes-the-highest-of-equals",
        "draft.cu",
        "best == top ? ~at : 0u",
        "best == top ? at : 0u",
        DRAFT + "test_equals_go_to_the_lowest_id_and_nan_ranks_last",
    ),
    Mutant(
        "draft-confidence-without-the-embedding",
        "draft.cu",
        "v = e[row * rank + i - width];",
        "v = 0.0f * e[row * rank + i - width];",
        DRAFT + "test_a_confidence_is_one_dot",
    ),
)
