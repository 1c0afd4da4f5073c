/* embed.cu - rows of the embedding, decoded into the residual streams. Compiled once a FORMAT.
 *
 *   embed        x[r,c,:] = w[ids[r],:]   for every stream c
 *
 * Layout      w: codes and scales as weights.cuh says, [V, D]; ids: i32 [R], in 0 .. V-1; x: f32 [R, S, D].
 * Launch      block 128: a warp owns a chunk of columns, or one of the passes after the last whole chunk; grid
 *             (ceil(chunks and passes / 4), R). D a multiple of 8 (32 or 256 as the format needs).
 * Arithmetic  the stored value, rounded once to f32.
 * Traffic     reads R rows of codes and scales, 4 bytes of ids a warp; writes 4 R S D.
 * Why so      one row a token: nothing to share.
 */
#include "common.cuh"
#include "weights.cuh"

constexpr int F = FORMAT;
constexpr int P = passes_of(F), C = 256 * P;

DEV void store_streams(gptr<float> x, const float (&w)[8], int S, int D, int d) {
    for (int c = 0; c < S; c++) {
        const i64 at = ((i64)blockIdx.y * S + c) * D + d;
        gst<float4>(x, at, make_float4(w[0], w[1], w[2], w[3]));
        gst<float4>(x, at + 4, make_float4(w[4], w[5], w[6], w[7]));
    }
}

DEV void embed(gptr<float> x, gptr<const u8> codes, gptr<const u8> scales, gptr<const i32> ids, int S, int D) {
    const int lane = threadIdx.x & 31, unit = blockIdx.x * 4 + threadIdx.x / 32;
    const int n_chunks = D / C, k0 = unit < n_chunks ? unit * C : n_chunks * C + (unit - n_chunks) * 256;
    if (k0 >= D) return;  // no barrier in this kernel
    const i64 row = ids[blockIdx.y];
    Raw<F> raw = {};
    float w[8], factor = 0.0f, low = 0.0f;
    if (unit < n_chunks) {
        load_chunk<F>(raw, codes, scales, row, D, unit, lane);
        if constexpr (F == kQ4K) q4k_pair(raw.more, lane & 7, factor, low);
#pragma unroll
        for (int j = 0; j < P; j++) {
            decode_pass<F>(raw, j, lane, factor, low, w);
            store_streams(x, w, S, D, k0 + j * 256 + lane * 8);
        }
        return;
    }
    const int n_lanes = min(32, (D - k0) / 8);
    if (lane >= n_lanes) return;
    load_tail<F>(raw, codes, scales, row, D, k0, lane, n_lanes);
    decode_tail<F>(raw, lane, w);
    store_streams(x, w, S, D, k0 + lane * 8);
}

#define EMBED_(format)                                                                                   \
    extern "C" __global__ void __launch_bounds__(128) embed_##format(                                    \
        gptr<float> x, gptr<const u8> codes, gptr<const u8> scales, gptr<const i32> ids, int S, int D) { \
        embed(x, codes, scales, ids, S, D);                                                              \
    }                                                                                                    \
    EXPORT(embed_##format)
#define EMBED(format) EMBED_(format)

EMBED(NAME)
