"""The mutants: one broken line of a product kernel each, and the test that notices.

When a kernel's line changes, its mutant follows (`line`), or is replaced by one of the new line.
"""

from __future__ import annotations

from tests.mutants.harness import Mutant

HYPER, KV, COMPRESS, ROPE = (f"tests/cuda/test_{name}.py::" for name in ("hyper", "kv", "compress", "rope"))
ENGRAM, TOPK, LINEAR, SAMPLE = (f"tests/cuda/test_{name}.py::" for name in ("engram", "topk", "linear", "sample"))
NORM, ROUTER, EXPERTS, LLOYD = (f"tests/cuda/test_{name}.py::" for name in ("norm", "router", "experts", "lloyd"))
ATTENTION, INDEX = (f"tests/cuda/test_{name}.py::" for name in ("attention", "index"))

MUTANTS: tuple[Mutant, ...] = (
    # -- hyper.cu
    Mutant(
        "hyper-dots-barrier-removed",
        "hyper.cu",
        "    sync_block();\n    for (int m = warp;",
        "    for (int m = warp;",
        HYPER + "test_mixes_agree_with_float64",
    ),
    Mutant(
        "hyper-dots-last-column-cut",
        "hyper.cu",
        "n_cols = min(kSlice, width - col0)",
        "n_cols = min(kSlice, width - col0 - 4)",
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
        "hyper-sinkhorn-rows-for-columns",
        "hyper.cu",
        "const bool by_row = step & 1;",
        "const bool by_row = !(step & 1);",
        HYPER + "test_specification_vectors",
    ),
    Mutant(
        "hyper-collapse-epsilon-doubled",
        "hyper.cu",
        "(float)width + eps);\n    for (int d = threadIdx.x; d < width; d += kThreads) y[",
        "(float)width + 2.0f * eps);\n    for (int d = threadIdx.x; d < width; d += kThreads) y[",
        HYPER + "test_collapse_is_a_norm_of_the_weighted_streams",
    ),
    Mutant(
        "hyper-expand-guard-off-by-one",
        "hyper.cu",
        "if (d >= width) return;",
        "if (d > width) return;",
        HYPER + "test_expand_sums_over_the_first_index",
    ),
    Mutant(
        "hyper-expand-comb-transposed",
        "hyper.cu",
        "comb[(row * S + j) * S + k]",
        "comb[(row * S + k) * S + j]",
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
    Mutant(
        "engram-scale-of-the-first-block",
        "engram.cu",
        "rows[first + head_dim + column / kScaleBlock]",
        "rows[first + head_dim]",
        ENGRAM + "test_rows_decode_exactly",
    ),
    Mutant(
        "engram-guard-off-by-one",
        "engram.cu",
        "if (row >= n_rows) return;",
        "if (row > n_rows) return;",
        ENGRAM + "test_rows_decode_exactly",
    ),
    Mutant(
        "engram-shut-mask-of-row-0",
        "engram.cu",
        "shut[row] != 0",
        "shut[0] != 0",
        ENGRAM + "test_shut_rows_stay_as_they_are",
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
        "window-scale-of-half-a-block",
        "kv.cu",
        "fmaxf(own, shfl_xor(own, 1))",
        "own",
        KV + "test_packed_rows_are_the_reference_quantisers",
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
        "compress-epsilon-doubled",
        "compress.cu",
        "(float)HEAD_DIM + eps)",
        "(float)HEAD_DIM + 2.0f * eps)",
        COMPRESS + "test_latents_agree_with_float64",
    ),
    Mutant(
        "compress-turned-at-the-last-position",
        "compress.cu",
        "p - ratio + 1, freq",
        "p, freq",
        COMPRESS + "test_stored_rows_are_turned_at_the_first_position",
    ),
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
    Mutant(
        "topk-last-block-not-forced",
        "topk.cu",
        "n_rows ? (n_rows - 1) / block_size : -1",
        "-1",
        TOPK + "test_blocks_are_the_best_with_the_last_forced",
    ),
    Mutant(
        "topk-mask-tail-not-cleared",
        "topk.cu",
        "for (int i = (n + 31) / 32 + threadIdx.x; i < words",
        "for (int i = (n + 31) / 32 + 1 + threadIdx.x; i < words",
        TOPK + "test_blocks_are_the_best_with_the_last_forced",
    ),
    # -- sample.cu
    Mutant(
        "sample-highest-of-equals",
        "sample.cu",
        "best = max(best, (u64)order_key(x) << 32 | (0xffffffffu - (u32)v));",
        "best = max(best, (u64)order_key(x) << 32 | (0xffffffffu - (u32)(v ^ 1)));",
        SAMPLE + "test_greedy_takes_the_lowest_of_equals",
    ),
    Mutant(
        "sample-barrier-removed",
        "sample.cu",
        "    sync_block();\n    if (lane == 0) sm.best[warp] = v;\n    sync_block();\n    v = sm.best[lane];\n"
        "    for (int m = 16; m; m >>= 1) v = max",
        "    sync_block();\n    if (lane == 0) sm.best[warp] = v;\n    v = sm.best[lane];\n"
        "    for (int m = 16; m; m >>= 1) v = max",
        SAMPLE + "test_greedy_takes_the_lowest_of_equals",
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
        "norm-first-column-skipped",
        "norm.cu",
        "for (int d = threadIdx.x; d < width; d += kThreads) {",
        "for (int d = threadIdx.x + 1; d < width; d += kThreads) {",
        NORM + "test_error_is_within_the_rounding_bound",
    ),
    # -- router.cu
    Mutant(
        "route-bias-left-out",
        "router.cu",
        "ordered(s + bias[e])",
        "ordered(s)",
        ROUTER + "test_the_bias_selects_and_does_not_weigh",
    ),
    Mutant(
        "route-ties-to-the-highest",
        "router.cu",
        "if (v > best)",
        "if (v >= best)",
        ROUTER + "test_ties_go_to_the_lowest_expert",
    ),
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
        "experts-codebook-barrier-removed",
        "experts_step.cu",
        "    cp_async_wait<0>();\n    sync_block();\n",
        "    cp_async_wait<0>();\n",
        EXPERTS + "test_one_row",
        at=1,
    ),
    Mutant(
        "experts-up-not-clamped-below",
        "codes.cuh",
        "fmaxf(up, -limit)",
        "up",
        EXPERTS + "test_clamps",
    ),
    Mutant(
        "experts-plane-bit-in-the-wrong-place",
        "codes.cuh",
        "(high >> i & 1u) << 12",
        "(high >> i & 1u) << 11",
        EXPERTS + "test_one_row",
    ),
    Mutant(
        "experts-plan-last-item-too-long",
        "experts_plan.cu",
        "min(cap, n - i * cap)",
        "cap",
        EXPERTS + "test_plan",
    ),
    Mutant(
        "moe-sum-first-slot-skipped",
        "experts_plan.cu",
        "for (int j = 0; j < k; j++) sum",
        "for (int j = 1; j < k; j++) sum",
        EXPERTS + "test_moe_sum_adds_slots_in_order_then_shared",
    ),
    Mutant(
        "experts-prefill-barrier-after-the-reads-removed",
        "experts_prefill.cu",
        "sync_block();  // the next tile's weights overwrite these",
        "",
        EXPERTS + "test_prefill_on_tensor_cores",
    ),
    Mutant(
        "experts-prefill-reads-the-other-buffer",
        "experts_prefill.cu",
        "((tile & 1) * kM + m_warp",
        "((~tile & 1) * kM + m_warp",
        EXPERTS + "test_prefill_on_tensor_cores",
    ),
    # -- linear_step.cu
    Mutant(
        "linear-split-last-part-left-out",
        "linear_step.cu",
        "for (int i = 1; i < kWarps; i++) total",
        "for (int i = 1; i < kWarps - 1; i++) total",
        LINEAR + "test_a_step_is_within_its_rounding_bound",
    ),
    Mutant(
        "linear-split-barrier-removed",
        "linear_step.cu",
        "        sync_block();\n        if (warp == 0",
        "        if (warp == 0",
        LINEAR + "test_a_step_is_within_its_rounding_bound",
    ),
    Mutant(
        "linear-tail-cut",
        "linear_step.cu",
        "min(32, (K - k0) / 8)",
        "min(32, (K - k0) / 8 - 1)",
        LINEAR + "test_a_step_is_within_its_rounding_bound",
    ),
    Mutant(
        "linear-guard-off-by-one",
        "linear_step.cu",
        "n0 + i < N) y[",
        "n0 + i <= N) y[",
        LINEAR + "test_a_step_is_within_its_rounding_bound",
    ),
    # -- attention.cu and attention_mma.cu
    Mutant(
        "attention-window-one-too-long",
        "attention.cu",
        "oldest = p - window + 1;",
        "oldest = p - window;",
        ATTENTION + "test_outputs_agree_with_float64[a window just wrapped-step]",
    ),
    Mutant(
        "attention-sink-left-out",
        "attention.cu",
        "l + exp_f(sinks[head] - m)",
        "l",
        ATTENTION + "test_outputs_agree_with_float64[a sink above every score-step]",
    ),
    Mutant(
        "attention-warp-barrier-removed",
        "attention.cu",
        "        sync_warp();",
        "",
        ATTENTION + "test_outputs_agree_with_float64[several splits-step]",
    ),
    Mutant(
        "attention-output-turned-forwards",
        "attention.cu",
        "p, freq, -1.0f)",
        "p, freq, 1.0f)",
        ATTENTION + "test_outputs_agree_with_float64[several splits-step]",
    ),
    Mutant(
        "attention-splits-not-rescaled",
        "attention.cu",
        "const float keep = exp_f(ml.x - m);",
        "const float keep = 1.0f;",
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
        "index-one-row-too-many",
        "index.cu",
        "if (j >= min(((i32)pos[row] + 1) / ratio, capacity)) continue;",
        "if (j >= min(((i32)pos[row] + 1) / ratio + 1, capacity)) continue;",
        INDEX + "test_scores_agree_with_float64",
    ),
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
    # -- lloyd.cu
    Mutant(
        "lloyd-ties-to-the-highest", "lloyd.cu", "s > best", "s >= best", LLOYD + "test_ties_go_to_the_lowest_code"
    ),
    Mutant("lloyd-carry-lost", "lloyd.cu", "old + lo < old", "0u", LLOYD + "test_the_carry_goes_up"),
    Mutant(
        "lloyd-tile-overwritten",
        "lloyd.cu",
        "        sync_block();\n    }\n    if (v < n) index",
        "    }\n    if (v < n) index",
        LLOYD + "test_assignment_is_nearest_within_rounding",
    ),
)

# Run with the long matrices only; the others cover every file and every kind of slip.
LONG = {
    *("hyper-sinkhorn-rows-for-columns", "hyper-expand-comb-transposed", "hyper-dots-last-column-cut"),
    *("engram-scale-of-the-first-block", "engram-guard-off-by-one", "engram-shut-mask-of-row-0"),
    *("window-scale-of-half-a-block", "compress-epsilon-doubled", "compress-turned-at-the-last-position"),
    *("topk-last-block-not-forced", "topk-mask-tail-not-cleared", "sample-highest-of-equals"),
    *("norm-first-column-skipped", "route-bias-left-out", "route-ties-to-the-highest"),
    *("experts-up-not-clamped-below", "experts-plane-bit-in-the-wrong-place", "experts-codebook-barrier-removed"),
    *("experts-prefill-reads-the-other-buffer", "moe-sum-first-slot-skipped"),
    *("linear-tail-cut", "linear-guard-off-by-one", "linear-split-last-part-left-out"),
    *("attention-window-one-too-long", "attention-warp-barrier-removed", "attention-splits-not-rescaled"),
    *("index-one-row-too-many", "lloyd-ties-to-the-highest", "lloyd-tile-overwritten"),
}
