/* rope.cu - rotary position embedding of the attention's queries, in place.
 *
 *   rope_query   (q[r,h,2i], q[r,h,2i+1]) *= e^(i pos[r] freq[i]) over the last ROPE channels of HEAD
 *
 * Layout      q: A [R, H, HEAD_DIM], rows contiguous, A = f32 or bf16; pos: i32 [R]; freq: f32 [ROPE_DIM/2].
 * Launch      grid (R, ceil(H/4)), block 128: a warp owns one head of one row, a lane every 32nd pair.
 * Arithmetic  f32: angle = float(pos) * freq, one product and one rounded sum a component; written back in A.
 * Traffic     reads and writes R H ROPE sizeof(A) bytes; reads 4 R + 2 ROPE more.
 * Why so      8 KB a row at the released shape: the launch is the cost, so nothing is staged and nothing meets at a
 *             barrier. The inverse rotation of the output lives in attention.cu, where the row is in registers.
 */
#include "common.cuh"

constexpr int kThreads = 128;

DEV void load_pair(gptr<const float> p, i64 i, float& re, float& im) {
    const float2 f = gld<float2>(p, i);
    re = f.x, im = f.y;
}
DEV void load_pair(gptr<const bf16> p, i64 i, float& re, float& im) {
    const u32 w = gld<u32>(p, i);
    re = bf16_lo(w), im = bf16_hi(w);
}
DEV void store_pair(gptr<float> p, i64 i, float re, float im) { gst<float2>(p, i, float2{re, im}); }
DEV void store_pair(gptr<bf16> p, i64 i, float re, float im) { gst<u32>(p, i, bf16_pair(re, im)); }

template <class A>
DEV void rope_body(gptr<A> q, gptr<const i32> pos, gptr<const float> freq, i32 n_heads) {
    const int head = blockIdx.y * (kThreads / 32) + threadIdx.x / 32;
    grid_release();
    if (head >= n_heads) return;
    const i64 first = ((i64)blockIdx.x * n_heads + head) * HEAD_DIM + HEAD_DIM - ROPE_DIM;
    const float p = (float)(i32)pos[blockIdx.x];
    for (int i = threadIdx.x % 32; i < ROPE_DIM / 2; i += 32) {
        float re, im, sine, cosine;
        load_pair(gptr<const A>(q), first + 2 * i, re, im);
        sincos_f(p * freq[i], sine, cosine);
        store_pair(q, first + 2 * i, re * cosine - im * sine, re * sine + im * cosine);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    rope_query_f32(gptr<float> q, gptr<const i32> pos, gptr<const float> freq, i32 n_heads) {
    rope_body<float>(q, pos, freq, n_heads);
}
EXPORT(rope_query_f32)

extern "C" __global__ void __launch_bounds__(kThreads)
    rope_query_bf16(gptr<bf16> q, gptr<const i32> pos, gptr<const float> freq, i32 n_heads) {
    rope_body<bf16>(q, pos, freq, n_heads);
}
EXPORT(rope_query_bf16)
