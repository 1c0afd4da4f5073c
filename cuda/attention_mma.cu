/* attention_mma.cu - attention of many rows on tensor cores: bf16 queries, packed keys decoded once a block.
 *
 *   attention_mma_h16, attention_mma_h32    the formula of attention.cu, for 16 or 32 heads a block
 *
 * Layout      as attention.cu, with A = bf16 and packed rows (u8): q, out bf16 [R, H, HEAD_DIM], slots of a row in the
 *             order of its list, -1 only at the end of picks.
 * Launch      grid (ceil(H / heads), R), block 128 or 256: a block owns heads of one row; four warps share 16 heads,
 *             each a quarter of the channels (whole k16 slices, rounded up: the last quarters may be short or empty).
 *             Shared memory: 32 keys in bf16, four partial score tiles, the weights. Any R, any H.
 * Arithmetic  keys are exact in bf16 (e4m3 or e2m1 times their scale). Scores: each k16 slice starts at zero in the
 *             tensor core and is added by a float add in rising channel; quarters as (0+1)+(2+3). Softmax in f32 over
 *             tiles of 32 slots, a running maximum, sums by warp_sum; weights rounded to bf16 for the values (the
 *             denominator is not), values added slice by slice as the scores. Tiles are ranges of slots, so a row's
 *             bits depend neither on the other rows nor on chunk borders. Sums inside one mma are the hardware's.
 * Traffic     a row reads q once, each of its valid key rows once a 16 or 32 heads, and writes out once.
 * Why so      a decoded key in shared memory serves scores plainly and values transposed, and all else is mma. Query
 *             fragments and the output stay in registers, which 512 channels only allow if four warps share a head
 *             tile: 32 + 64 registers a thread. 64 heads in one block would gather each key once instead of twice
 *             (the second time from the cache), but 512 threads leave 128 registers each and the compiler spilled.
 */
#include "common.cuh"
#include "kvrows.cuh"

static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 512 && ROPE_DIM % 2 == 0 && ROPE_DIM <= HEAD_DIM);

constexpr int kKeys = 32;                              // slots a tile
constexpr int kSlices = HEAD_DIM / 16;                 // k16 slices of a row
constexpr int kOwn = (kSlices + 3) / 4;                // slices of a warp
constexpr int kRow = HEAD_DIM + 8;                     // bf16 a key in shared memory: rows start in different banks
constexpr int kAhead = 4;                              // loads of a thread in flight
constexpr int kPart = kKeys + 8, kWeight = kKeys + 8;  // floats, bf16 a head

template <int TILES>
struct MmaSmem {
    sarr<bf16, kKeys * kRow> keys;
    sarr<float, 4 * TILES * 16 * kPart> part;
    sarr<bf16, TILES * 16 * kWeight> weights;
    sarr<float, TILES * 16> factor;  // of the accumulators: the rescaling of a tile, at the end 1 / denominator
};

// Where a row's key slots come from.
struct Slots {
    gptr<const u8> ring, chunk, comp;
    gptr<const i32> picks;
    i64 first_pick;
    i32 oldest, lowest, start, window, ring_rows, n_slots;

    DEV i32 pick(int slot) const { return picks[first_pick + slot - window]; }
    DEV bool valid(int slot) const {
        if (slot < window) return oldest + slot >= lowest;
        return slot < n_slots && pick(slot) >= 0;
    }
    // 8 channels of a slot as stored, and their scale's code; of no key: zeros
    DEV void fetch(uint2& codes, u32& scale, int slot, int c0) const {
        codes = uint2{0u, 0u}, scale = 0u;
        if (slot < window) {
            const i32 at = oldest + slot;
            if (at < lowest) return;
            const bool recent = at >= start;
            const gptr<const u8> rows = recent ? chunk : ring;
            const i64 base = (i64)(recent ? at - start : at % ring_rows) * window_row_bytes(HEAD_DIM);
            codes = gld<uint2>(rows, base + c0);
            scale = rows[base + HEAD_DIM + c0 / 32];
        } else if (slot < n_slots) {
            const i32 row = pick(slot);
            if (row < 0) return;
            const i64 base = (i64)row * comp_row_bytes(HEAD_DIM);
            codes.x = gld<u32>(comp, base + c0 / 2);
            scale = comp[base + HEAD_DIM / 2 + c0 / 16];
        }
    }
    // the same as bf16, exactly
    DEV uint4 decode(uint2 codes, u32 scale, int slot) const {
        float k[8];
        if (slot < window) {
            e4m3x8_to_f32((u64)codes.x | (u64)codes.y << 32, k);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) k[i] = e2m1_to_f32(codes.x >> (4 * i) & 15);
        }
        const float s = slot < window ? ue8m0_to_f32((u8)scale) : e4m3_to_f32((u8)scale);
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            w[i] = __float_as_uint(k[2 * i] * s) >> 16 | (__float_as_uint(k[2 * i + 1] * s) & 0xffff0000u);
        return uint4{w[0], w[1], w[2], w[3]};
    }
};

template <int TILES>
DEV void mma_body(gptr<bf16> out, gptr<const bf16> q, gptr<const u8> ring, gptr<const u8> chunk, gptr<const u8> comp,
                  gptr<const i32> picks, gptr<const float> sinks, gptr<const i32> pos, gptr<const float> freq,
                  gptr<const i32> first, i32 n_heads, i32 window, i32 ring_rows, i32 topk, float scale) {
    SMEM(MmaSmem<TILES>, sm);
    constexpr int kThreads = 128 * TILES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tile = warp / 4, slice0 = warp % 4 * kOwn;  // this warp's heads and slices
    const int g = lane / 4, t2 = lane % 4 * 2;            // its place in a fragment
    const int head0 = blockIdx.x * 16 * TILES;
    const int row = blockIdx.y;
    const i32 p = pos[row];
    const Slots slots{
        ring,        chunk,  comp,      picks,        (i64)row * topk, p - window + 1, max((i32)first[0], 0),
        (i32)pos[0], window, ring_rows, window + topk};

    u32 a[kOwn][4];
    float o[kOwn][2][4];
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int head = head0 + tile * 16 + g + i % 2 * 8, c = (slice0 + s) * 16 + t2 + i / 2 * 8;
            const bool there = head < n_heads && slice0 + s < kSlices;
            a[s][i] = there ? gld<u32>(q, ((i64)row * n_heads + head) * HEAD_DIM + c) : 0u;
            o[s][0][i] = o[s][1][i] = 0.0f;
        }
    }
    float top = -1e30f, sum = 0.0f;  // lane i < 4 keeps those of head warp * 4 + i
    const int n_mine = min(n_heads - head0 - warp * 4, 4);
    for (int i = max(n_mine, 0); i < 4; ++i) {  // heads that do not exist: finite, never stored
        sm.weights[(warp * 4 + i) * kWeight + lane] = from_f32<bf16>(0.0f);
        if (lane == 0) sm.factor[warp * 4 + i] = 0.0f;
    }

    const int empty = min(max(slots.lowest - slots.oldest, 0), window);
    for (int slot0 = empty / kKeys * kKeys; slot0 < slots.n_slots; slot0 += kKeys) {
        if (slot0 >= window && slots.pick(slot0) < 0) break;  // the same for the whole block
        constexpr int kEights = HEAD_DIM / 8, kUnits = kKeys * kEights;
#pragma unroll 1
        for (int u0 = threadIdx.x; u0 < kUnits; u0 += kAhead * kThreads) {
            uint2 codes[kAhead];
            u32 scales[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {  // these loads are on their way before the first is used
                const int u = u0 + i * kThreads;
                if (u < kUnits) slots.fetch(codes[i], scales[i], slot0 + u / kEights, u % kEights * 8);
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                const int u = u0 + i * kThreads, key = u / kEights;
                if (u < kUnits)
                    sst<uint4>(sm.keys, key * kRow + u % kEights * 8, slots.decode(codes[i], scales[i], slot0 + key));
            }
        }
        sync_block();

        const int part = (warp % 4 * TILES + tile) * 16 * kPart;
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            float score[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
            for (int s = 0; s < kOwn; ++s) {
                if (slice0 + s >= kSlices) break;
                u32 b[4];
                ldmatrix_x4(b, sm.keys,
                            (n * 8 + lane / 16 * 8 + lane % 8) * kRow + (slice0 + s) * 16 + lane / 8 % 2 * 8);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    mma_bf16_16816(d, a[s], b[2 * j], b[2 * j + 1]);
#pragma unroll
                    for (int i = 0; i < 4; ++i) score[j][i] += d[i];
                }
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int at = part + (n + j) * 8 + t2;
                sst<float2>(sm.part, at + g * kPart, float2{score[j][0], score[j][1]});
                sst<float2>(sm.part, at + (g + 8) * kPart, float2{score[j][2], score[j][3]});
            }
        }
        sync_block();

        const bool seen = slots.valid(slot0 + lane);
        float weight[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            weight[i] = 0.0f;
            if (i >= n_mine) continue;  // the same for the warp
            const int head = warp * 4 + i, at = head * kPart + lane;
            constexpr int kQuarter = TILES * 16 * kPart;
            const float s =
                ((sm.part[at] + sm.part[kQuarter + at]) + (sm.part[2 * kQuarter + at] + sm.part[3 * kQuarter + at])) *
                scale;
            const float most = warp_max(lane == i ? fmaxf(top, seen ? s : -1e30f) : seen ? s : -1e30f);
            weight[i] = seen ? exp_f(s - most) : 0.0f;
            sm.weights[head * kWeight + lane] = from_f32<bf16>(weight[i]);
            if (lane == i) {
                const float keep = exp_f(top - most);
                sum *= keep;
                top = most;
                sm.factor[head] = keep;
            }
        }
        if (n_mine > 0) warp_sums(weight);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (lane == i) sum += weight[i];
        sync_block();

        const float keep_low = sm.factor[tile * 16 + g], keep_high = sm.factor[tile * 16 + g + 8];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            u32 w[4];
            ldmatrix_x4(w, sm.weights, (tile * 16 + lane % 16) * kWeight + k * 16 + lane / 16 * 8);
#pragma unroll
            for (int s = 0; s < kOwn; ++s) {
                if (slice0 + s >= kSlices) break;
                u32 b[4];
                ldmatrix_x4_trans(b, sm.keys, (k * 16 + lane % 16) * kRow + (slice0 + s) * 16 + lane / 16 * 8);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    mma_bf16_16816(d, w, b[2 * j], b[2 * j + 1]);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (k == 0) o[s][j][i] *= i < 2 ? keep_low : keep_high;
                        o[s][j][i] += d[i];
                    }
                }
            }
        }
        sync_block();  // keys, weights and factors have been read
    }

    if (lane < 4 && head0 + warp * 4 + lane < n_heads) {
        const float denominator = sum + exp_f(sinks[head0 + warp * 4 + lane] - top);
        sm.factor[warp * 4 + lane] = sum == 0.0f ? 0.0f : 1.0f / denominator;  // no key at all: 0
    }
    sync_block();
    constexpr int kStill = HEAD_DIM - ROPE_DIM;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int head = tile * 16 + g + half * 8;
        if (head0 + head >= n_heads) continue;
        const float inverse = sm.factor[head];
        const i64 at = ((i64)row * n_heads + head0 + head) * HEAD_DIM;
#pragma unroll
        for (int s = 0; s < kOwn; ++s) {
            if (slice0 + s >= kSlices) break;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int c = (slice0 + s) * 16 + j * 8 + t2;
                float re = o[s][j][2 * half] * inverse, im = o[s][j][2 * half + 1] * inverse;
                if (c >= kStill) {
                    float sine, cosine;
                    sincos_f((float)p * freq[(c - kStill) / 2], sine, cosine);
                    const float turned = re * cosine + im * sine;
                    im = im * cosine - re * sine;
                    re = turned;
                }
                gst<u32>(out, at + c, bf16_pair(re, im));
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128)
    attention_mma_h16(gptr<bf16> out, gptr<const bf16> q, gptr<const u8> ring, gptr<const u8> chunk,
                      gptr<const u8> comp, gptr<const i32> picks, gptr<const float> sinks, gptr<const i32> pos,
                      gptr<const float> freq, gptr<const i32> first, i32 n_heads, i32 window, i32 ring_rows, i32 topk,
                      float scale) {
    mma_body<1>(out, q, ring, chunk, comp, picks, sinks, pos, freq, first, n_heads, window, ring_rows, topk, scale);
}
EXPORT(attention_mma_h16)

extern "C" __global__ void __launch_bounds__(256)
    attention_mma_h32(gptr<bf16> out, gptr<const bf16> q, gptr<const u8> ring, gptr<const u8> chunk,
                      gptr<const u8> comp, gptr<const i32> picks, gptr<const float> sinks, gptr<const i32> pos,
                      gptr<const float> freq, gptr<const i32> first, i32 n_heads, i32 window, i32 ring_rows, i32 topk,
                      float scale) {
    mma_body<2>(out, q, ring, chunk, comp, picks, sinks, pos, freq, first, n_heads, window, ring_rows, topk, scale);
}
EXPORT(attention_mma_h32)
