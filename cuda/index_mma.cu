/* index_mma.cu - scores of many rows against packed index keys, on tensor cores, with the bits of index_scores_fp4.
 *
 *   index_scores_mma   score[r,j] = sum_h w[r,h] * factor * max(0, q[r,h] . keys[j]), as in index.cu
 *
 * Layout      as index.cu with packed keys; q must be what index_query leaves (e2m1 times a power of two a block of 32),
 *             which bf16 holds exactly. Any number of heads.
 * Launch      grid (ceil(C/128), ceil(R/rows_per_block)), block 256: a warp owns 16 keys, decoded once into registers,
 *             and the block takes rows_per_block queries past them. Blocks beyond the last row's lens leave at once.
 *             Shared memory: 128 packed keys, one row's queries in bf16, its head weights.
 * Arithmetic  a block of 32 channels is two k16 slices summed in the tensor core from zero. Every product is a multiple
 *             of a quarter of the query's scale and the sum stays below 2^13 of them, so the sum is exact whatever the
 *             hardware's order. Scale, heads and chains then follow index.cu step by step: chain h / 2 % 4 is the
 *             fragment's own column pair, and (0+1)+(2+3) is two xor-shuffles. Bits equal index_scores_fp4's.
 * Traffic     reads row bytes a visible key and row group, 4 Hi (INDEX_DIM + 1) a row and block, 4 bytes of position a
 *             warp and row and a warp and block, and writes 4 bytes a visible key and row.
 * Why so      a prompt of 100,000 tokens scores 10^10 pairs of a row and a key, 4,096 products each: by FMA that is
 *             a tenth of its time. Keys are the fragment that stays, as a byte of a packed row is a register of it.
 */
#include "common.cuh"
#include "kvrows.cuh"

static_assert(INDEX_DIM % 32 == 0 && INDEX_DIM <= 128 && ROPE_DIM <= INDEX_DIM);

constexpr int kThreads = 256;
constexpr int kKeys = kThreads / 32 * 16;
constexpr int kWords = (INDEX_DIM / 2 + INDEX_DIM / 32 + 3) / 4;
constexpr int kBlocks = INDEX_DIM / 32;
constexpr int kRow = INDEX_DIM + 8;  // bf16 a query in shared memory: rows start in different banks

struct KeysSmem {
    sarr<u32, kKeys * kWords> keys;
};

DEV u32 e2m1_pair(u32 byte) {
    return __float_as_uint(e2m1_to_f32(byte & 15)) >> 16 |
           (__float_as_uint(e2m1_to_f32(byte >> 4 & 15)) & 0xffff0000u);
}

extern "C" __global__ void __launch_bounds__(256)
    index_scores_mma(gptr<float> scores, gptr<const float> q, gptr<const float> w, gptr<const u8> keys,
                     gptr<const i32> pos, gptr<const u32> mask, i32 n_rows, i32 n_heads, i32 ratio, i32 capacity,
                     i32 rows_per_block, i32 block_size, i32 mask_words, float factor) {
    SMEM(KeysSmem, sm);
    const int padded = (n_heads + 7) / 8 * 8;
    SMEM_DYN(bf16, query, sizeof(KeysSmem));
    SMEM_DYN(float, head_w, sizeof(KeysSmem) + 2 * padded * kRow);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row0 = blockIdx.y * rows_per_block, row1 = min(row0 + rows_per_block, n_rows);
    const int j0 = blockIdx.x * kKeys;
    const int visible = min(((i32)pos[row1 - 1] + 1) / ratio, capacity);  // the group's last row sees most
    if (j0 >= visible) return;

    const gptr<const u32> words = gcast<u32>(keys);
    const int n_words = min(kKeys, visible - j0) * kWords;
    for (int i = threadIdx.x; i < kKeys * kWords; i += kThreads)
        sm.keys[i] = i < n_words ? (u32)words[(i64)j0 * kWords + i] : 0u;
    for (int i = threadIdx.x; i < (padded - n_heads) * kRow; i += kThreads)
        query[n_heads * kRow + i] = from_f32<bf16>(0.0f);  // heads that do not exist
    sync_block();
    u32 a[2 * kBlocks][4];
    float scale[kBlocks][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int key = (warp * 16 + half * 8 + g) * kWords;
#pragma unroll
        for (int s = 0; s < 2 * kBlocks; ++s) {
            a[s][half] = e2m1_pair(sm.keys[key + 2 * s] >> (8 * t));
            a[s][half + 2] = e2m1_pair(sm.keys[key + 2 * s + 1] >> (8 * t));
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
            scale[b][half] = ue8m0_to_f32((u8)(sm.keys[key + INDEX_DIM / 8 + b / 4] >> (8 * (b % 4))));
    }

    for (int row = row0; row < row1; ++row) {
        if (row > row0) sync_block();  // the last row's queries have been read
        for (int i = threadIdx.x * 4; i < n_heads * INDEX_DIM; i += kThreads * 4) {
            const float4 x = gld<float4>(q, (i64)row * n_heads * INDEX_DIM + i);
            sst<uint2>(query, i / INDEX_DIM * kRow + i % INDEX_DIM, uint2{bf16_pair(x.x, x.y), bf16_pair(x.z, x.w)});
        }
        for (int h = threadIdx.x; h < n_heads; h += kThreads) head_w[h] = w[(i64)row * n_heads + h] * factor;
        sync_block();
        const int lens = min(((i32)pos[row] + 1) / ratio, capacity);
        const int j = j0 + warp * 16 + g;  // and j + 8
        bool wanted[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            wanted[half] = j + 8 * half < lens;
            if (wanted[half] && mask) {
                const int b = (j + 8 * half) / block_size;
                wanted[half] = mask[(i64)row * mask_words + b / 32] >> (b % 32) & 1;
            }
        }
        float chain[2] = {0.0f, 0.0f};
        if (any_lane(wanted[0] || wanted[1])) {
            for (int h0 = 0; h0 < n_heads; h0 += 8) {
                float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int b = 0; b < kBlocks; ++b) {
                    u32 x[4];
                    ldmatrix_x4(x, query, (h0 + lane % 8) * kRow + b * 32 + lane / 8 * 8);
                    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    mma_bf16_16816(d, a[2 * b], x[0], x[1]);
                    mma_bf16_16816(d, a[2 * b + 1], x[2], x[3]);
#pragma unroll
                    for (int i = 0; i < 4; ++i) dot[i] = fmaf(d[i], scale[b][i / 2], dot[i]);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int h = h0 + 2 * t + i % 2;
                    if (h < n_heads) chain[i / 2] = fmaf(head_w[h], fmaxf(dot[i], 0.0f), chain[i / 2]);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                chain[half] += shfl_xor(chain[half], 1);
                chain[half] += shfl_xor(chain[half], 2);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (t == 0 && j + 8 * half < lens)
                scores[(i64)row * capacity + j + 8 * half] =
                    wanted[half] ? chain[half] : __uint_as_float(0xff800000u);
    }
}
EXPORT(index_scores_mma)
