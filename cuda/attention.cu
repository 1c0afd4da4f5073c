/* attention.cu - sparse attention of a row: its window, its chosen compressed rows, a sink; by FMA.
 *
 *   attention_rows     s_j = (q[r,h] . K_j) * scale, M = max(max_j s_j, -1e30),
 *                      out[r,h] = rope^-1( sum_j exp(s_j - M) K_j / (sum_j exp(s_j - M) + exp(sink[h] - M)), pos[r] )
 *   attention_combine  the same from the partial sums of several blocks
 *
 * Layout      q, out: A [R, H, HEAD_DIM]; ring: window rows [ring_rows, ..], slot p % ring_rows; chunk: window rows
 *             [R, ..] of this call; comp: compressed rows; picks: i32 [R, topk], -1 only at the end; sinks: f32 [H];
 *             first: i32 [1], the lowest position whose window row exists. Rows as in kvrows.cuh (u8), or f32.
 *             Key slots of row r: slot i < window is position pos[r] - window + 1 + i, valid from max(first, 0) on,
 *             read from chunk if >= pos[0], else from ring; slot window + i is compressed row picks[r, i].
 *             part: f32 [R, H, n_splits, HEAD_DIM], a lane's channels 4 j .. 4 j + 3 at j HEAD_DIM / 4 + 4 lane; part_ml:
 *             f32 [R, H, n_splits, 2] (maximum, denominator).
 * Launch      attention_rows: grid (ceil(H/8), n_splits, R), block 64: a warp owns four heads, a lane 16 channels of
 *             query and output in registers; block y takes slots [y, y + 1) * split_slots. With n_splits = 1 it writes
 *             out, else attention_combine follows: grid (H, R), block 32. Shared memory: 80 floats a warp.
 * Arithmetic  f32. Keys in slot order, four at a time. A dot: 16 products of a lane by fmaf in rising channel, lanes
 *             by xor 16, 8, 4, 2, 1. The running maximum rises group by group; a group's four exponentials are added
 *             as (0+2)+(1+3) and accumulators are rescaled once a group. Splits are ranges of slots, so neither the
 *             number of rows, nor chunk borders, nor replays move a bit; the split size does (step against prefill).
 * Traffic     reads q once a split and every valid key row, less its padding, once per four heads (from the cache but
 *             for the first time), writes out once; with splits, part is written and read once, in whole lines.
 * Why so      one query row has 640 keys and 64 heads: too many heads for one warp's registers, too few keys to fill
 *             the machine, so blocks are heads by key ranges. Packed rows are decoded in registers, twice (scores,
 *             values), which is cheaper than a trip through shared memory; scores of 4 keys x 4 heads meet in one
 *             transposed butterfly, a shuffle a score, and one lane in two computes its exponential.
 */
#include "common.cuh"
#include "kvrows.cuh"

static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 512 && ROPE_DIM % 2 == 0 && ROPE_DIM <= HEAD_DIM);

constexpr int kWarps = 2;
constexpr int kThreads = 32 * kWarps;
constexpr int kHeads = 4;  // a warp
constexpr int kKeys = 4;   // a group

// One lane's 16 channels of a key, as stored.
template <class Row>
struct Key;

template <>
struct Key<float> {
    float v[16];
    DEV void window(gptr<const float> rows, i64 row, int c0) { load16(v, rows, row * HEAD_DIM + c0); }
    DEV void compressed(gptr<const float> rows, i64 row, int c0) { load16(v, rows, row * HEAD_DIM + c0); }
    DEV void decode(float (&k)[16], bool) const {
#pragma unroll
        for (int i = 0; i < 16; ++i) k[i] = v[i];
    }
};

template <>
struct Key<u8> {
    uint4 codes;
    u32 scale;
    DEV void window(gptr<const u8> rows, i64 row, int c0) {
        const i64 base = row * window_row_bytes(HEAD_DIM);
        codes = gld<uint4>(rows, base + c0);
        scale = rows[base + HEAD_DIM + c0 / 32];
    }
    DEV void compressed(gptr<const u8> rows, i64 row, int c0) {
        const i64 base = row * comp_row_bytes(HEAD_DIM);
        const uint2 half = gld<uint2>(rows, base + c0 / 2);
        codes = uint4{half.x, half.y, 0u, 0u};
        scale = rows[base + HEAD_DIM / 2 + c0 / 16];
    }
    DEV void decode(float (&k)[16], bool is_window) const {
        if (is_window)
            e4m3_decode16(k, codes, ue8m0_to_f32((u8)scale));
        else
            e2m1_decode16(k, uint2{codes.x, codes.y}, e4m3_to_f32((u8)scale));
    }
};

struct RowsSmem {
    sarr<float, kWarps * 2 * (kKeys * kHeads + kHeads)> weights;  // two turns: exponentials, then the rescaling
};

// A partial sum's j-th four channels of a lane: quarters apart, so that a warp writes and reads whole lines.
DEV i64 part_at(i64 vector, int lane, int j) { return vector * HEAD_DIM + j * (HEAD_DIM / 4) + lane * 4; }

template <class A>
DEV void finish16(gptr<A> out, i64 at, int c0, float (&o)[16], float denominator, float sum, i32 p,
                  gptr<const float> freq) {
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / denominator;  // no key at all: 0
#pragma unroll
    for (int i = 0; i < 16; ++i) o[i] *= inverse;
    rope16(o, c0, HEAD_DIM, ROPE_DIM, p, freq, -1.0f);
    store16(out, at, o);
}

template <class A, class Row>
DEV void attention_body(gptr<A> out, gptr<float> part, gptr<float> part_ml, gptr<const A> q, gptr<const Row> ring,
                        gptr<const Row> chunk, gptr<const Row> comp, gptr<const i32> picks, gptr<const float> sinks,
                        gptr<const i32> pos, gptr<const float> freq, gptr<const i32> first, i32 n_heads, i32 window,
                        i32 ring_rows, i32 topk, i32 split_slots, float scale) {
    SMEM(RowsSmem, sm);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c0 = lane * kLaneCh;
    const int head0 = (blockIdx.x * kWarps + warp) * kHeads;
    const int row = blockIdx.z, split = blockIdx.y, n_splits = gridDim.y;
    const bool mine = c0 < HEAD_DIM;
    if (head0 >= n_heads) return;  // a whole warp; the block has no barrier
    const i32 p = pos[row], start = pos[0], lowest = max((i32)first[0], 0);

    float q16[kHeads][16], o[kHeads][16];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int i = 0; i < 16; ++i) q16[h][i] = 0.0f, o[h][i] = 0.0f;
        if (mine && head0 + h < n_heads) load16(q16[h], q, ((i64)row * n_heads + head0 + h) * HEAD_DIM + c0);
    }
    // lane l speaks for key l / 8 of a group and head l / 2 % 4
    const int my_key = lane / 8, my_head = lane / 2 % kHeads;
    float top = -1e30f, sum = 0.0f;

    const int oldest = p - window + 1;  // slot 0's position
    const int end = min((split + 1) * split_slots, window + topk);
    const int empty = min(max(lowest - oldest, 0), window);
    // groups start at multiples of 4 from the split's first slot; leading groups without a key would change nothing
    int slot0 = split * split_slots;
    slot0 += max(empty - slot0, 0) / kKeys * kKeys;
    constexpr int kTurn = kKeys * kHeads + kHeads;
    int turn = warp * 2 * kTurn;
    for (; slot0 < end; slot0 += kKeys) {
        Key<Row> keys[kKeys];
        i32 pick[kKeys];
        u32 valid = 0;
#pragma unroll
        for (int n = 0; n < kKeys; ++n)  // no branch between these loads, which all keys of the group wait for
            pick[n] = slot0 + n >= window && slot0 + n < end ? (i32)picks[(i64)row * topk + slot0 + n - window] : -1;
#pragma unroll
        for (int n = 0; n < kKeys; ++n) {
            const int slot = slot0 + n;
            if (slot >= end) continue;
            if (slot < window) {
                const i32 at = oldest + slot;
                if (at < lowest) continue;
                valid |= 1u << n;
                if (!mine) continue;
                if (at >= start)
                    keys[n].window(chunk, at - start, c0);
                else
                    keys[n].window(ring, at % ring_rows, c0);
            } else {
                if (pick[n] < 0) continue;
                valid |= 1u << n;
                if (mine) keys[n].compressed(comp, pick[n], c0);
            }
        }
        if (valid == 0) {
            if (slot0 >= window) break;  // picks end with their first -1
            continue;
        }
        float s[kKeys * kHeads], k[16];
#pragma unroll
        for (int n = 0; n < kKeys; ++n) {
#pragma unroll
            for (int h = 0; h < kHeads; ++h) s[n * kHeads + h] = 0.0f;
            if (!mine || !(valid >> n & 1)) continue;
            keys[n].decode(k, slot0 + n < window);
#pragma unroll
            for (int h = 0; h < kHeads; ++h)
#pragma unroll
                for (int i = 0; i < 16; ++i) s[n * kHeads + h] = fmaf(q16[h][i], k[i], s[n * kHeads + h]);
        }
        const bool seen = valid >> my_key & 1;
        const float score = warp_sums_spread(s) * scale;
        float most = seen ? score : -1e30f;
        most = fmaxf(most, shfl_xor(most, 8));
        most = fmaxf(top, fmaxf(most, shfl_xor(most, 16)));
        const float weight = seen ? exp_f(score - most) : 0.0f;
        float total = weight + shfl_xor(weight, 16);
        total += shfl_xor(total, 8);
        const float keep = exp_f(top - most);
        sum = sum * keep + total;
        top = most;
        if (lane % 2 == 0) sm.weights[turn + lane / 2] = weight;
        if (lane < 8 && lane % 2 == 0) sm.weights[turn + kKeys * kHeads + my_head] = keep;
        sync_warp();  // the other turn's floats may still be read by a slower lane, these not
        if (mine) {
            const float4 rescale = sld<float4>(sm.weights, turn + kKeys * kHeads);
            const float a[kHeads] = {rescale.x, rescale.y, rescale.z, rescale.w};
#pragma unroll
            for (int h = 0; h < kHeads; ++h)
#pragma unroll
                for (int i = 0; i < 16; ++i) o[h][i] *= a[h];
#pragma unroll
            for (int n = 0; n < kKeys; ++n) {
                if (!(valid >> n & 1)) continue;
                keys[n].decode(k, slot0 + n < window);
                const float4 e = sld<float4>(sm.weights, turn + n * kHeads);
                const float w[kHeads] = {e.x, e.y, e.z, e.w};
#pragma unroll
                for (int h = 0; h < kHeads; ++h)
#pragma unroll
                    for (int i = 0; i < 16; ++i) o[h][i] = fmaf(w[h], k[i], o[h][i]);
            }
        }
        turn += turn == warp * 2 * kTurn ? kTurn : -kTurn;
    }

#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        const float m = shfl(top, 2 * h), l = shfl(sum, 2 * h);
        const int head = head0 + h;
        if (head >= n_heads) continue;
        const i64 at = (i64)row * n_heads + head;
        if (n_splits == 1) {
            if (mine) finish16(out, at * HEAD_DIM + c0, c0, o[h], l + exp_f(sinks[head] - m), l, p, freq);
        } else {
            if (lane == 0) gst<float2>(part_ml, (at * n_splits + split) * 2, float2{m, l});
            if (mine && l != 0.0f) {  // without keys there is nothing to write; NaN is passed on
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    gst<float4>(part, part_at(at * n_splits + split, lane, j),
                                float4{o[h][4 * j], o[h][4 * j + 1], o[h][4 * j + 2], o[h][4 * j + 3]});
            }
        }
    }
}

template <class A>
DEV void combine_body(gptr<A> out, gptr<const float> part, gptr<const float> part_ml, gptr<const float> sinks,
                      gptr<const i32> pos, gptr<const float> freq, i32 n_heads, i32 n_splits) {
    const int head = blockIdx.x, row = blockIdx.y, c0 = threadIdx.x * kLaneCh;
    const i64 at = (i64)row * n_heads + head;
    if (c0 >= HEAD_DIM) return;
    float m = -1e30f;
    for (int s = 0; s < n_splits; ++s) m = fmaxf(m, part_ml[(at * n_splits + s) * 2]);
    float o[16], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) o[i] = 0.0f;
    for (int s = 0; s < n_splits; ++s) {
        const float2 ml = gld<float2>(part_ml, (at * n_splits + s) * 2);
        if (ml.y == 0.0f) continue;  // a split without keys has no partial sum
        const float keep = exp_f(ml.x - m);
        sum = fmaf(ml.y, keep, sum);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 x = gld<float4>(part, part_at(at * n_splits + s, threadIdx.x, j));
            o[4 * j] = fmaf(x.x, keep, o[4 * j]);
            o[4 * j + 1] = fmaf(x.y, keep, o[4 * j + 1]);
            o[4 * j + 2] = fmaf(x.z, keep, o[4 * j + 2]);
            o[4 * j + 3] = fmaf(x.w, keep, o[4 * j + 3]);
        }
    }
    finish16(out, at * HEAD_DIM + c0, c0, o, sum + exp_f(sinks[head] - m), sum, pos[row], freq);
}

#define ATTENTION(name, A, Row)                                                                                   \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                        \
        name(gptr<A> out, gptr<float> part, gptr<float> part_ml, gptr<const A> q, gptr<const Row> ring,           \
             gptr<const Row> chunk, gptr<const Row> comp, gptr<const i32> picks, gptr<const float> sinks,         \
             gptr<const i32> pos, gptr<const float> freq, gptr<const i32> first, i32 n_heads, i32 window,         \
             i32 ring_rows, i32 topk, i32 split_slots, float scale) {                                             \
        attention_body<A, Row>(out, part, part_ml, q, ring, chunk, comp, picks, sinks, pos, freq, first, n_heads, \
                               window, ring_rows, topk, split_slots, scale);                                      \
    }                                                                                                             \
    EXPORT(name)

ATTENTION(attention_rows_f32_f32, float, float)
ATTENTION(attention_rows_f32_fp4, float, u8)
ATTENTION(attention_rows_bf16_f32, bf16, float)
ATTENTION(attention_rows_bf16_fp4, bf16, u8)

#define COMBINE(name, A)                                                                              \
    extern "C" __global__ void __launch_bounds__(32)                                                  \
        name(gptr<A> out, gptr<const float> part, gptr<const float> part_ml, gptr<const float> sinks, \
             gptr<const i32> pos, gptr<const float> freq, i32 n_heads, i32 n_splits) {                \
        combine_body<A>(out, part, part_ml, sinks, pos, freq, n_heads, n_splits);                     \
    }                                                                                                 \
    EXPORT(name)

COMBINE(attention_combine_f32, float)
COMBINE(attention_combine_bf16, bf16)
