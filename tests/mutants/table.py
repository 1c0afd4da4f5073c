"""The mutants: one broken line of a product kernel each, and the test that notices."""

from __future__ import annotations

from tests.mutants.harness import Mutant

HYPER, KV, COMPRESS, ROPE = (f"tests/cuda/test_{name}.py::" for name in ("hyper", "kv", "compress", "rope"))
ENGRAM, TOPK, LINEAR, SAMPLE = (f"tests/cuda/test_{name}.py::" for name in ("engram", "topk", "linear", "sample"))

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
)
