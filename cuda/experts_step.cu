/* experts_step.cu - the routed experts for few rows, straight from codes and codebook.
 *
 *   experts_gate_up  h[p,f] = silu(min(g, limit)) * clamp(u, -limit, limit) * weight[p]
 *                    g, u = gain_f * sum_d C[code[f, d/8]][d%8] x[p / k, d],   expert = picks[p]
 *   experts_down     y[p,d] = gain_d * factor_d * sum_f C[code[d, f/8]][f%8] h[p,f]
 *
 * Layout      codes, plane, gains, codebook, factors: codes.cuh. Slots p = r k + j. x: A [R, D]; h: A [R k, F];
 *             y: f32 [R k, D]. *_one: R = 1, slot j is item j. *_rows: items and order of experts_plan, cap 8.
 * Launch      persistent: `blocks` blocks (one: 576 threads, rows: 256), 8 n_codes bytes of shared memory. A warp
 *             takes an octet of rows of one item; octet-and-item w goes to block w % blocks. F, D multiples of 8.
 * Arithmetic  f32. A lane sums its columns (256 b + 8 lane + 0..7 for rising b) into one accumulator a row of the
 *             matrix and of x, each a fused multiply-add; then lanes by xor-shuffle, then the gain, in down times
 *             its factor first: gain * (domain * post). One rounding of h to A. A slot's bits depend on nothing but
 *             the slot: not on R, k, blocks, nor on who shares its expert. A factor of 1 leaves all bits.
 * Traffic     reads, for every item, all codes (1.5 bytes each, 1.625 with the plane, whole blocks) and 4 bytes a
 *             row of gains; in down 5 bytes an octet (the scale's byte serves four) of each mounted sidecar; the
 *             codebook once a block; activations once an octet and slot; writes h, y.
 * Why so      a codebook fits in shared memory, so an index costs 1.5 bytes of bandwidth and one gather; the fewer
 *             blocks, the fewer copies of the codebook: experts.py keeps them under a tenth of the codes. Work is cut
 *             by octets because 384-byte blocks then need no shuffle and each activation serves eight rows. Launched
 *             ahead: the codebook is on its way before the picks are known.
 */
#include "common.cuh"
#include "codes.cuh"

struct Work {
    int expert, first, count;
};

/// sum[m][r] of lane i: row i of the octet of matrix m times x-row r of the work; the other lanes' are not used.
template <int M, int MAX, class A>
DEV void dot_octet(float (&sum)[M][MAX], sptr<u64> book, gptr<const u32> codes, gptr<const u8> plane, i64 first,
                   int width, gptr<const A> x, const int (&row)[MAX], int count, int lane) {
    constexpr int kHeld = MAX < 4 ? MAX : 4;
    const int n_blocks = (width + 255) / 256;
    float acc[M][8][MAX] = {};
    Codes<M> now = {}, next = {};
    load_codes<M>(now, codes, plane, first, n_blocks, 0, lane);
#pragma unroll 1
    for (int b = 0; b < n_blocks; b++) {
        if (b + 1 < n_blocks) load_codes<M>(next, codes, plane, first, n_blocks, b + 1, lane);
        const int d = b * 256 + lane * 8;
        if (d < width) {
#pragma unroll
            for (int r0 = 0; r0 < MAX;
                 r0 += kHeld) {  // more than four rows would not fit the registers: decode again
                if (r0 >= count) break;
                float v[kHeld][8];
#pragma unroll
                for (int r = 0; r < kHeld; r++) {
                    if (r0 + r < count) load8(x, (i64)row[r0 + r] * width + d, v[r]);
                }
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        float w[8];
                        e4m3x8_to_f32(book[code_of(now.w[m], now.high[m], i)], w);
#pragma unroll
                        for (int r = 0; r < kHeld; r++) {
                            if (r0 + r < count) {
#pragma unroll
                                for (int e = 0; e < 8; e++)
                                    acc[m][i][r0 + r] = fmaf(w[e], v[r][e], acc[m][i][r0 + r]);
                            }
                        }
                    }
                }
            }
        }
        now = next;
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < MAX; r++) {
            if (r >= count) break;
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = acc[m][i][r];
            warp_sums(v);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (lane == i) sum[m][r] = v[i];
            }
        }
    }
}

template <int MAX>
DEV Work work_of(int item, gptr<const i32> picks, gptr<const i32> items) {
    if constexpr (MAX == 1) return Work{picks[item], item, 1};
    return Work{items[item * 4], items[item * 4 + 1], items[item * 4 + 2]};
}

/// Slot number r of the work; past its last one the last again, which nobody uses.
template <int MAX>
DEV int slot_of(Work work, gptr<const i32> order, int r) {
    return MAX == 1 ? work.first : order[work.first + min(r, work.count - 1)];
}

template <int THREADS, int MAX, class A>
DEV void gate_up(gptr<A> h, gptr<const u64> codebook, gptr<const u32> codes, gptr<const u8> plane,
                 gptr<const float> gains, gptr<const A> x, gptr<const i32> picks, gptr<const float> weights,
                 gptr<const i32> order, gptr<const i32> items, gptr<const i32> n_items, int k, int F, int D,
                 int n_codes, float limit) {
    SMEM_DYN(u64, book, 0);
    stage_codebook<THREADS>(book, codebook, n_codes);
    grid_wait();
    grid_release();
    cp_async_wait<0>();
    sync_block();
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, octets = F / 8, n_blocks = (D + 255) / 256;
    const int n_work = (MAX == 1 ? k : n_items[0]) * octets;
    for (int w = blockIdx.x + gridDim.x * warp; w < n_work; w += gridDim.x * (THREADS / 32)) {
        const Work work = work_of<MAX>(w / octets, picks, items);
        const i64 octet = (i64)work.expert * octets + w % octets;
        int row[MAX];
#pragma unroll
        for (int r = 0; r < MAX; r++) row[r] = slot_of<MAX>(work, order, r) / k;
        const i64 first = octet * 2 * n_blocks;
        float sum[2][MAX] = {};
        if constexpr (MAX == 1) {
            dot_octet<2, MAX, A>(sum, book, codes, plane, first, D, x, row, work.count, lane);
        } else {  // both at once would not fit the registers; x comes twice from the first-level cache
            float part[1][MAX] = {};
#pragma unroll 1
            for (int m = 0; m < 2; m++) {
                dot_octet<1, MAX, A>(part, book, codes, plane, first + m * n_blocks, D, x, row, work.count, lane);
#pragma unroll
                for (int r = 0; r < MAX; r++) sum[0][r] = sum[1][r], sum[1][r] = part[0][r];
            }
        }
        const float gain = lane < 16 ? gains[octet * 16 + lane] : 0.0f;  // gate's eight, then up's
        const float up_gain = shfl_down(gain, 8);
#pragma unroll
        for (int r = 0; r < MAX; r++) {
            if (r >= work.count || lane >= 8) break;
            // r is below the count; read again: eight registers less above
            const int slot = MAX == 1 ? work.first : order[work.first + r];
            const float a = clamped_swiglu(sum[0][r] * gain, sum[1][r] * up_gain, limit) * weights[slot];
            h[(i64)slot * F + w % octets * 8 + lane] = from_f32<A>(a);
        }
    }
}

template <int THREADS, int MAX, class A>
DEV void down(gptr<float> y, gptr<const u64> codebook, gptr<const u32> codes, gptr<const u8> plane,
              gptr<const float> gains, const Factors& factors, gptr<const A> h, gptr<const i32> picks,
              gptr<const i32> order, gptr<const i32> items, gptr<const i32> n_items, int k, int F, int D,
              int n_codes) {
    SMEM_DYN(u64, book, 0);
    stage_codebook<THREADS>(book, codebook, n_codes);
    grid_wait();
    grid_release();
    cp_async_wait<0>();
    sync_block();
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, octets = D / 8, n_blocks = (F + 255) / 256;
    const int n_work = (MAX == 1 ? k : n_items[0]) * octets;
    for (int w = blockIdx.x + gridDim.x * warp; w < n_work; w += gridDim.x * (THREADS / 32)) {
        const Work work = work_of<MAX>(w / octets, picks, items);
        const i64 octet = (i64)work.expert * octets + w % octets;
        int slot[MAX];
#pragma unroll
        for (int r = 0; r < MAX; r++) slot[r] = slot_of<MAX>(work, order, r);
        float sum[1][MAX] = {};
        dot_octet<1, MAX, A>(sum, book, codes, plane, octet * n_blocks, F, h, slot, work.count, lane);
        float factor[1], gain = 0.0f;
        if (lane < 8) {
            factors_of(factor, factors, octet, lane);
            gain = gains[octet * 8 + lane] * factor[0];
        }
#pragma unroll
        for (int r = 0; r < MAX; r++) {
            if (r >= work.count || lane >= 8) break;
            y[(i64)slot[r] * D + w % octets * 8 + lane] = sum[0][r] * gain;
        }
    }
}

#define STEP(suffix, THREADS, MAX, A)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_gate_up_##suffix(                             \
        gptr<A> h, gptr<const u64> codebook, gptr<const u32> codes, gptr<const u8> plane, gptr<const float> gains, \
        gptr<const A> x, gptr<const i32> picks, gptr<const float> weights, gptr<const i32> order,                  \
        gptr<const i32> items, gptr<const i32> n_items, int k, int F, int D, int n_codes, float limit) {           \
        gate_up<THREADS, MAX, A>(h, codebook, codes, plane, gains, x, picks, weights, order, items, n_items, k, F, \
                                 D, n_codes, limit);                                                               \
    }                                                                                                              \
    EXPORT(experts_gate_up_##suffix)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_down_##suffix(                                \
        gptr<float> y, gptr<const u64> codebook, gptr<const u32> codes, gptr<const u8> plane,                      \
        gptr<const float> gains, gptr<const u32> domain, gptr<const u8> domain_scale, gptr<const u32> post,        \
        gptr<const u8> post_scale, gptr<const A> h, gptr<const i32> picks, gptr<const i32> order,                  \
        gptr<const i32> items, gptr<const i32> n_items, int k, int F, int D, int n_codes) {                        \
        const Factors factors{domain, domain_scale, post, post_scale};                                             \
        down<THREADS, MAX, A>(y, codebook, codes, plane, gains, factors, h, picks, order, items, n_items, k, F, D, \
                              n_codes);                                                                            \
    }                                                                                                              \
    EXPORT(experts_down_##suffix)

STEP(bf16_one, 576, 1, bf16)
STEP(f32_one, 576, 1, float)
STEP(bf16_rows, 256, 8, bf16)
STEP(f32_rows, 256, 8, float)
