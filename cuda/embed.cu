/* embed.cu - rows of the embedding, decoded into the residual streams. Compiled once a FORMAT.
 *
 *   embed        x[r,c,:] = w[ids[r],:]   for every stream c
 *
 * Layout      w: codes and scales as weights.cuh says, [V, D]; ids: i32 [R], in 0 .. V-1; x: f32 [R, S, D].
 * Launch      grid (ceil(D / 1024), R), block 128: a thread owns eight columns. D a multiple of 8.
 * Arithmetic  the stored value, rounded once to f32.
 * Traffic     reads R rows of w and 4 R of ids a block, writes 4 R S D.
 * Why so      one row a token: nothing to share.
 */
#include "common.cuh"
#include "weights.cuh"

DEV void embed(gptr<float> x, gptr<const u8> codes, gptr<const u8> scales, gptr<const i32> ids, int S, int D) {
    const int d = (blockIdx.x * 128 + threadIdx.x) * 8;
    if (d >= D) return;  // no barrier in this kernel
    float w[8];
    weight8<FORMAT>(codes, scales, ids[blockIdx.y], D, d, w);
    for (int c = 0; c < S; c++) {
        const i64 at = ((i64)blockIdx.y * S + c) * D + d;
        gst<float4>(x, at, make_float4(w[0], w[1], w[2], w[3]));
        gst<float4>(x, at + 4, make_float4(w[4], w[5], w[6], w[7]));
    }
}

#define EMBED_(format)                                                                                   \
    extern "C" __global__ void __launch_bounds__(128) embed_##format(                                    \
        gptr<float> x, gptr<const u8> codes, gptr<const u8> scales, gptr<const i32> ids, int S, int D) { \
        embed(x, codes, scales, ids, S, D);                                                              \
    }                                                                                                    \
    EXPORT(embed_##format)
#define EMBED(format) EMBED_(format)

EMBED(NAME)
