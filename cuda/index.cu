/* index.cu - the indexer: keys, queries, and the score of every visible row.
 *
 *   index_keys     keys[j] = Q4idx( rope( k[r] * w / sqrt(mean(k[r]^2) + eps), ratio * j ) ), j = pos[r] / ratio, for
 *                  rows with (pos[r] + 1) % ratio == 0                            (no rounding in kv f32)
 *   index_query    q[r,h] = Q4idx( rope(q[r,h], pos[r]) ), in place, as float values
 *   index_scores   score[r,j] = sum_h w[r,h] * factor * max(0, q[r,h] . keys[j]) for j < lens = (pos[r] + 1) / ratio;
 *                  -inf where a candidate mask is given and block j / block_size is not in it
 *
 * Layout      k: f32 [R, INDEX_DIM]; q: f32 [R, Hi, INDEX_DIM]; w: f32 [R, Hi]; keys: index rows of kvrows.cuh, u8
 *             [C, row bytes] or f32 [C, INDEX_DIM]; scores: f32 [R, C], entries from lens on are not written; mask: u32
 *             [R, words], bit b % 32 of word b / 32 for block b. INDEX_DIM <= 128 (a key is held in registers), a multiple of 32.
 * Launch      index_keys: grid ceil(R/4), block 128, a warp a row. index_query: block 128, a thread 16 channels.
 *             index_scores: grid (ceil(C/128), ceil(R/rows_per_block)), block 128: a thread owns one key and the block
 *             takes rows_per_block queries past it; blocks beyond the last row's lens leave at once. Shared memory:
 *             128 packed keys and one row's queries.
 * Arithmetic  f32. A dot is summed in blocks of 32 channels: channel c goes to chain c % 4 in rising c, the chains
 *             meet as (0+1)+(2+3), the block times its scale is added in rising order. With packed keys every product
 *             is a small multiple of a power of two, so a block's dot is exact in any order. Head h goes to chain
 *             h / 2 % 4 by fmaf in rising h, the chains meet as (0+1)+(2+3): the order of index_mma.cu, which gives
 *             the same bits. A score depends on its row and its key alone.
 * Traffic     index_scores reads row bytes a visible key and row group, 4 Hi (INDEX_DIM + 1) a row and block, and
 *             writes 4 bytes a visible key and row; index_query reads and writes 4 R Hi INDEX_DIM.
 * Why so      keys are 68 bytes, so a thread reading its own row would touch a sector for every word: the block
 *             copies its keys as one stream of whole lines, and 17 words a row leave no bank conflict. Queries are
 *             read by all threads at once (a broadcast).
 */
#include "common.cuh"
#include "kvrows.cuh"

static_assert(INDEX_DIM % 32 == 0 && INDEX_DIM <= 128 && ROPE_DIM % 2 == 0 && ROPE_DIM <= INDEX_DIM);

constexpr int kThreads = 128;

struct StageSmem {
    sarr<float, kThreads / 32 * stage_floats(INDEX_DIM)> weights;
};
constexpr int kKeys = 128;

DEV void store_key(gptr<float> keys, i64 j, int c0, const float (&v)[16], float, bool mine) {
    if (mine) store16(keys, j * INDEX_DIM + c0, v);
}

DEV void store_key(gptr<u8> keys, i64 j, int c0, const float (&v)[16], float amax, bool mine) {
    if (!mine) return;
    constexpr int kScales = INDEX_DIM / 2, kRow = index_row_bytes(INDEX_DIM);
    const i64 base = j * kRow;
    const u32 e = q4idx_exp(amax);
    const uint2 codes = e2m1_codes(v, ue8m0_to_f32((u8)e));
    gst<u32>(keys, base + c0 / 2, codes.x);
    gst<u32>(keys, base + c0 / 2 + 4, codes.y);
    if (c0 % 32 == 0) keys[base + kScales + c0 / 32] = (u8)e;
    if (c0 == 0)
        for (int b = kScales + INDEX_DIM / 32; b < kRow; ++b) keys[base + b] = (u8)0;
}

template <class Row>
DEV void keys_body(gptr<Row> keys, gptr<const float> k, gptr<const float> w, gptr<const i32> pos,
                   gptr<const float> freq, i32 n_rows, i32 ratio, float eps) {
    const int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    const int c0 = threadIdx.x % 32 * kLaneCh;
    prefetch_all<kThreads>(w, INDEX_DIM);
    grid_wait();
    grid_release();
    const i32 p = row < n_rows ? (i32)pos[row] : 0;
    const bool mine = row < n_rows && c0 < INDEX_DIM && (p + 1) % ratio == 0;

    SMEM(StageSmem, sm);
    float v[16], weight[16];
    if (row < n_rows && (p + 1) % ratio == 0)  // the same for the warp
        warp_load16(weight, sm.weights + threadIdx.x / 32 * stage_floats(INDEX_DIM), w, INDEX_DIM);
    float sum_sq = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = 0.0f;
    if (mine) load16(v, k, (i64)row * INDEX_DIM + c0);
#pragma unroll
    for (int i = 0; i < 16; ++i) sum_sq = fmaf(v[i], v[i], sum_sq);
    const float scale = 1.0f / sqrtf(warp_sum(sum_sq) / (float)INDEX_DIM + eps);
    if (mine) {
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = v[i] * scale * weight[i];
        rope16(v, c0, INDEX_DIM, ROPE_DIM, p - ratio + 1, freq, 1.0f);
    }
    const float own = amax16(v);
    store_key(keys, p / ratio, c0, v, fmaxf(own, shfl_xor(own, 1)), mine);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    index_keys_f32(gptr<float> keys, gptr<const float> k, gptr<const float> w, gptr<const i32> pos,
                   gptr<const float> freq, i32 n_rows, i32 ratio, float eps) {
    keys_body<float>(keys, k, w, pos, freq, n_rows, ratio, eps);
}
EXPORT(index_keys_f32)

extern "C" __global__ void __launch_bounds__(kThreads)
    index_keys_fp4(gptr<u8> keys, gptr<const float> k, gptr<const float> w, gptr<const i32> pos,
                   gptr<const float> freq, i32 n_rows, i32 ratio, float eps) {
    keys_body<u8>(keys, k, w, pos, freq, n_rows, ratio, eps);
}
EXPORT(index_keys_fp4)

template <bool PACKED>
DEV void query_body(gptr<float> q, gptr<const i32> pos, gptr<const float> freq, i32 n_rows, i32 n_heads) {
    const i64 c = ((i64)blockIdx.x * kThreads + threadIdx.x) * kLaneCh;  // among all R Hi INDEX_DIM channels
    const i64 width = (i64)n_heads * INDEX_DIM;
    const bool mine = c < n_rows * width;
    const int c0 = (int)(c % INDEX_DIM);
    grid_release();

    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = 0.0f;
    if (mine) {
        load16(v, q, c);
        rope16(v, c0, INDEX_DIM, ROPE_DIM, pos[c / width], freq, 1.0f);
    }
    if (PACKED) {
        const float own = amax16(v);
        const float s = ue8m0_to_f32((u8)q4idx_exp(fmaxf(own, shfl_xor(own, 1))));
        e2m1_decode16(v, e2m1_codes(v, s), s);
    }
    if (mine) store16(q, c, v);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    index_query_f32(gptr<float> q, gptr<const i32> pos, gptr<const float> freq, i32 n_rows, i32 n_heads) {
    query_body<false>(q, pos, freq, n_rows, n_heads);
}
EXPORT(index_query_f32)

extern "C" __global__ void __launch_bounds__(kThreads)
    index_query_fp4(gptr<float> q, gptr<const i32> pos, gptr<const float> freq, i32 n_rows, i32 n_heads) {
    query_body<true>(q, pos, freq, n_rows, n_heads);
}
EXPORT(index_query_fp4)

// A tile of keys as 32-bit words, in shared memory; the f32 row is padded against bank conflicts.
template <class Row>
struct Tile;
template <>
struct Tile<u8> {
    static constexpr int kWords = index_row_bytes(INDEX_DIM) / 4, kStride = kWords;
};
template <>
struct Tile<float> {
    static constexpr int kWords = INDEX_DIM, kStride = INDEX_DIM + 1;
};

template <class Row>
struct ScoresSmem {
    sarr<u32, kKeys * Tile<Row>::kStride> keys;
};

// this thread's key: values without scale, and a scale a block of 32
DEV void take_key(float (&k)[INDEX_DIM], float (&scale)[INDEX_DIM / 32], ScoresSmem<float>& sm, int t) {
#pragma unroll
    for (int c = 0; c < INDEX_DIM; ++c) k[c] = __uint_as_float(sm.keys[t * Tile<float>::kStride + c]);
#pragma unroll
    for (int b = 0; b < INDEX_DIM / 32; ++b) scale[b] = 1.0f;
}

DEV void take_key(float (&k)[INDEX_DIM], float (&scale)[INDEX_DIM / 32], ScoresSmem<u8>& sm, int t) {
    constexpr int kStride = Tile<u8>::kStride;
#pragma unroll
    for (int i = 0; i < INDEX_DIM / 8; ++i) {
        const u32 codes = sm.keys[t * kStride + i];
#pragma unroll
        for (int n = 0; n < 8; ++n) k[8 * i + n] = e2m1_to_f32(codes >> (4 * n) & 15);
    }
#pragma unroll
    for (int b = 0; b < INDEX_DIM / 32; ++b) {
        const u32 word = sm.keys[t * kStride + INDEX_DIM / 8 + b / 4];
        scale[b] = ue8m0_to_f32((u8)(word >> (8 * (b % 4))));
    }
}

template <class Row>
DEV void scores_body(gptr<float> scores, gptr<const float> q, gptr<const float> w, gptr<const Row> keys,
                     gptr<const i32> pos, gptr<const u32> mask, i32 n_rows, i32 n_heads, i32 ratio, i32 capacity,
                     i32 rows_per_block, i32 block_size, i32 mask_words, float factor) {
    SMEM(ScoresSmem<Row>, sm);
    SMEM_DYN(float, query, sizeof(ScoresSmem<Row>));
    const int width = n_heads * INDEX_DIM;
    SMEM_DYN(float, head_w, sizeof(ScoresSmem<Row>) + 4 * width);
    const int row0 = blockIdx.y * rows_per_block, row1 = min(row0 + rows_per_block, n_rows);
    const int j0 = blockIdx.x * kKeys, j = j0 + threadIdx.x;
    const int visible = min(((i32)pos[row1 - 1] + 1) / ratio, capacity);  // the group's last row sees most
    if (j0 >= visible) return;

    constexpr int kWords = Tile<Row>::kWords, kStride = Tile<Row>::kStride;
    const gptr<const u32> words = gcast<u32>(keys);
    const int n_words = min(kKeys, visible - j0) * kWords;
    for (int i = threadIdx.x; i < n_words; i += kThreads)
        sm.keys[kStride == kWords ? i : i / kWords * kStride + i % kWords] = words[(i64)j0 * kWords + i];
    sync_block();
    float k[INDEX_DIM], scale[INDEX_DIM / 32];
    take_key(k, scale, sm, min((int)threadIdx.x, visible - 1 - j0));  // a thread past the end computes nothing

    for (int row = row0; row < row1; ++row) {
        if (row > row0) sync_block();  // the last row's queries have been read
        for (int i = threadIdx.x * 4; i < width; i += kThreads * 4)
            sst<float4>(query, i, gld<float4>(q, (i64)row * width + i));
        for (int h = threadIdx.x; h < n_heads; h += kThreads) head_w[h] = w[(i64)row * n_heads + h] * factor;
        sync_block();
        if (j >= min(((i32)pos[row] + 1) / ratio, capacity)) continue;
        bool wanted = true;
        if (mask) {
            const int b = j / block_size;
            wanted = mask[(i64)row * mask_words + b / 32] >> (b % 32) & 1;
        }
        float left = 0.0f, right = 0.0f;  // (chain 0 + chain 1), (chain 2 + chain 3)
#pragma unroll 1
        for (int chain = 0; wanted && chain < 4; ++chain) {
            float sum = 0.0f;
#pragma unroll 1
            for (int h0 = 2 * chain; h0 < n_heads; h0 += 8) {
#pragma unroll
                for (int h = h0; h < h0 + 2; ++h) {
                    if (h >= n_heads) break;
                    float dot = 0.0f;
#pragma unroll
                    for (int b = 0; b < INDEX_DIM / 32; ++b) {
                        float c0 = 0.0f, c1 = 0.0f, c2 = 0.0f, c3 = 0.0f;
#pragma unroll
                        for (int i = 32 * b; i < 32 * b + 32; i += 4) {
                            const float4 x = sld<float4>(query, h * INDEX_DIM + i);
                            c0 = fmaf(x.x, k[i], c0), c1 = fmaf(x.y, k[i + 1], c1);
                            c2 = fmaf(x.z, k[i + 2], c2), c3 = fmaf(x.w, k[i + 3], c3);
                        }
                        dot = fmaf((c0 + c1) + (c2 + c3), scale[b], dot);
                    }
                    sum = fmaf(head_w[h], fmaxf(dot, 0.0f), sum);
                }
            }
            if (chain < 2)
                left += sum;
            else
                right += sum;
        }
        const float score = left + right;
        scores[(i64)row * capacity + j] = wanted ? score : __uint_as_float(0xff800000u);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    index_scores_f32(gptr<float> scores, gptr<const float> q, gptr<const float> w, gptr<const float> keys,
                     gptr<const i32> pos, gptr<const u32> mask, i32 n_rows, i32 n_heads, i32 ratio, i32 capacity,
                     i32 rows_per_block, i32 block_size, i32 mask_words, float factor) {
    scores_body<float>(scores, q, w, keys, pos, mask, n_rows, n_heads, ratio, capacity, rows_per_block, block_size,
                       mask_words, factor);
}
EXPORT(index_scores_f32)

extern "C" __global__ void __launch_bounds__(kThreads)
    index_scores_fp4(gptr<float> scores, gptr<const float> q, gptr<const float> w, gptr<const u8> keys,
                     gptr<const i32> pos, gptr<const u32> mask, i32 n_rows, i32 n_heads, i32 ratio, i32 capacity,
                     i32 rows_per_block, i32 block_size, i32 mask_words, float factor) {
    scores_body<u8>(scores, q, w, keys, pos, mask, n_rows, n_heads, ratio, capacity, rows_per_block, block_size,
                    mask_words, factor);
}
EXPORT(index_scores_fp4)
