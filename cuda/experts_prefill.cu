/* experts_prefill.cu - the routed experts for many rows of bf16 activations, on tensor cores.
 *
 *   experts_gate_up_mma  h[p,f] = bf16(silu(min(g, limit)) * clamp(u, -limit, limit) * weight[p])
 *   experts_down_mma     y[p,d] = gain_d * factor_d * sum_f C[code[d, f/8]][f%8] h[p,f]
 *
 * Layout      as experts_step.cu; items and order of experts_plan, cap 64.
 * Launch      persistent: `blocks` blocks of 256, 8 n_codes + 27,648 bytes of shared memory. A tile is one item's
 *             slots by 64 rows of codes (gate-up: 32 of each matrix); tile t goes to block t % blocks. F, D multiples
 *             of 8. f32 activations take experts_step's *_rows kernels instead, with items of up to 8 slots.
 * Arithmetic  codewords and activations are exact in bf16. A slice of 16 columns is one mma from zero, added in f32,
 *             slices in rising order; then the gain, with its factor as in experts_step.cu. A slot's bits depend on
 *             nothing but the slot.
 * Traffic     for every item: each 12 bytes of three words twice (1.5 bytes a weight of a code, then the cache's),
 *             the plane four times; activations once a tile of 64 rows of codes; per tile and warp 12 bytes
 *             of the item, 32 of order, 512 in the epilogue (gains, order, weights) and in down 40 of each mounted
 *             sidecar; the codebook once a block. Writes h, y.
 * Why so      rows are sorted by expert so that an expert's bits are decoded once for up to 64 of them. The block
 *             keeps the codebook while it walks from tile to tile; the next tile's words travel during the products.
 */
#include "common.cuh"
#include "codes.cuh"

constexpr int kThreads = 256;
constexpr int kM = 64, kN = 64, kK = 64, kPitch = kK + 8;

struct Smem {
    sarr<bf16, 2 * kM * kPitch> x;
    sarr<bf16, kN * kPitch> w;
};

/// acc[4 tiles of 8 rows][4] of this warp: 16 slots by 16 + 16 rows (M = 2: gate, then up) or by 32 rows (M = 1).
template <int M>
DEV void tile_product(float (&acc)[4][4], Smem& sm, sptr<u64> book, gptr<const u32> codes, gptr<const u8> plane,
                      gptr<const bf16> x, const i64 (&row)[2], i64 octet0, int n_octets, int count, int width) {
    const int t = threadIdx.x, lane = t & 31, warp = t / 32, o = t & 7;
    const int n_blocks = (width + 255) / 256, n_tiles = (width + kK - 1) / kK;
    // this thread decodes rows 2 pair, 2 pair + 1 of octet q at column group o of the tile
    const int q = t / 8 & 7, pair = t / 64, m = M == 2 ? q / 4 : 0, octet = M == 2 ? q % 4 : q;
    const int word = 24 * pair / 32, bit = 24 * pair % 32;
    const i64 first = ((octet0 + octet) * M + m) * n_blocks;
    const bool live = octet < n_octets;
    const int w_row = (M == 2 ? m * 32 + octet * 8 : octet * 8) + pair * 2;
    const int m_warp = warp / 2 * 16, n_warp = warp % 2;

    auto fetch_x = [&](int tile) {
        const int d = tile * kK + o * 8;
        for (int i = 0; i < 2; i++) {
            const int at = ((tile & 1) * kM + t / 8 + i * 32) * kPitch + o * 8;
            const int m = t / 8 + i * 32;
            if (m >= (count + 15) / 16 * 16) break;  // rows that no warp multiplies
            if (d < width && m < count) {
                cp_async16(sm.x, at, x, row[i] * width + d);
            } else {
                sst<uint4>(sm.x, at, make_uint4(0, 0, 0, 0));
            }
        }
        cp_async_commit();
    };
    u32 a = 0, b = 0, high = 0;
    auto fetch_codes = [&](int tile) {
        const int column = tile * 8 + o;
        if (!live || column * 8 >= width) return;
        const i64 at = first + column / 32;
        a = gld_nc<u32>(codes, at * kBlockWords + word * 32 + column % 32);
        if (bit > 8) b = gld_nc<u32>(codes, at * kBlockWords + word * 32 + 32 + column % 32);
        if (plane != nullptr && tile % 4 == 0) high = gld_nc<u32>(plane, at * 32 + o * 4);  // for four tiles
    };
    auto store_w = [&](int tile) {
        const bool some = live && (tile * 8 + o) * 8 < width;
        u32 both = a >> bit;
        if (bit > 8) both |= b << (32 - bit);
        for (int i = 0; i < 2; i++) {
            const u32 code = (both >> 12 * i & 4095u) | (high >> (tile % 4 * 8 + 2 * pair + i) & 1u) << 12;
            float w[8] = {};
            if (some) e4m3x8_to_f32(book[code], w);
            const uint4 packed = make_uint4(bf16_pair(w[0], w[1]), bf16_pair(w[2], w[3]), bf16_pair(w[4], w[5]),
                                            bf16_pair(w[6], w[7]));
            sst<uint4>(sm.w, (w_row + i) * kPitch + o * 8, packed);
        }
    };

    fetch_x(0);
    fetch_codes(0);
    for (int tile = 0; tile < n_tiles; tile++) {
        store_w(tile);
        cp_async_wait<0>();
        sync_block();
        if (tile + 1 < n_tiles) {
            fetch_x(tile + 1);
            fetch_codes(tile + 1);
        }
        if (m_warp < count) {
#pragma unroll
            for (int s = 0; s < kK; s += 16) {
                u32 av[4];
                ldmatrix_x4(av, sm.x, ((tile & 1) * kM + m_warp + (lane & 15)) * kPitch + s + lane / 16 * 8);
#pragma unroll
                for (int p = 0; p < 2; p++) {
                    const int n = (M == 2 ? p * 32 + n_warp * 16 : n_warp * 32 + p * 16) + (lane & 7) + lane / 16 * 8;
                    u32 bv[4];
                    ldmatrix_x4(bv, sm.w, n * kPitch + s + (lane / 8 & 1) * 8);
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                        mma_bf16_16816(d, av, bv[2 * j], bv[2 * j + 1]);
#pragma unroll
                        for (int e = 0; e < 4; e++) acc[p * 2 + j][e] += d[e];
                    }
                }
            }
        }
        sync_block();  // the next tile's weights overwrite these
    }
}

/// The row of x that this thread copies in places t / 8 and t / 8 + 32 of the item.
DEV i64 slot_at(gptr<const i32> order, int first, int count, int i) { return order[first + min(i, count - 1)]; }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    experts_gate_up_mma(gptr<bf16> h, gptr<const u64> codebook, gptr<const u32> codes, gptr<const u8> plane,
                        gptr<const float> gains, gptr<const bf16> x, gptr<const float> weights, gptr<const i32> order,
                        gptr<const i32> items, gptr<const i32> n_items, int k, int F, int D, int n_codes,
                        float limit) {
    SMEM(Smem, sm);
    SMEM_DYN(u64, book, sizeof(Smem));
    stage_codebook<kThreads>(book, codebook, n_codes);
    cp_async_wait<0>();
    sync_block();
    const int t = threadIdx.x, lane = t & 31, warp = t / 32, octets = F / 8, wide = (octets + 3) / 4;
    const int n_work = n_items[0] * wide;
    for (int work = blockIdx.x; work < n_work; work += gridDim.x) {
        const int item = work / wide, octet0 = work % wide * 4;
        const i64 expert = items[item * 4];
        const int first = items[item * 4 + 1], count = items[item * 4 + 2];
        const i64 row[2] = {slot_at(order, first, count, t / 8) / k, slot_at(order, first, count, t / 8 + 32) / k};
        float acc[4][4] = {};
        tile_product<2>(acc, sm, book, codes, plane, x, row, expert * octets + octet0, octets - octet0, count, D);
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int m = warp / 2 * 16 + half * 8 + lane / 4, i = lane % 4 * 2,
                          octet = octet0 + warp % 2 * 2 + j;
                if (m >= count || octet >= octets) continue;
                const i64 slot = order[first + m], at = (expert * octets + octet) * 16 + i;
                const float2 g = gld<float2>(gains, at), u = gld<float2>(gains, at + 8);
                const float weight = weights[slot];
                const float a = clamped_swiglu(acc[j][half * 2] * g.x, acc[2 + j][half * 2] * u.x, limit) * weight;
                const float b =
                    clamped_swiglu(acc[j][half * 2 + 1] * g.y, acc[2 + j][half * 2 + 1] * u.y, limit) * weight;
                gst<u32>(h, slot * F + octet * 8 + i, bf16_pair(a, b));
            }
        }
    }
}
EXPORT(experts_gate_up_mma)

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    experts_down_mma(gptr<float> y, gptr<const u64> codebook, gptr<const u32> codes, gptr<const u8> plane,
                     gptr<const float> gains, gptr<const u32> domain, gptr<const u8> domain_scale,
                     gptr<const u32> post, gptr<const u8> post_scale, gptr<const bf16> h, gptr<const i32> order,
                     gptr<const i32> items, gptr<const i32> n_items, int F, int D, int n_codes) {
    const Factors factors{domain, domain_scale, post, post_scale};
    SMEM(Smem, sm);
    SMEM_DYN(u64, book, sizeof(Smem));
    stage_codebook<kThreads>(book, codebook, n_codes);
    cp_async_wait<0>();
    sync_block();
    const int t = threadIdx.x, lane = t & 31, warp = t / 32, octets = D / 8, wide = (octets + 7) / 8;
    const int n_work = n_items[0] * wide;
    for (int work = blockIdx.x; work < n_work; work += gridDim.x) {
        const int item = work / wide, octet0 = work % wide * 8;
        const i64 expert = items[item * 4];
        const int first = items[item * 4 + 1], count = items[item * 4 + 2];
        const i64 row[2] = {slot_at(order, first, count, t / 8), slot_at(order, first, count, t / 8 + 32)};
        float acc[4][4] = {};
        tile_product<1>(acc, sm, book, codes, plane, h, row, expert * octets + octet0, octets - octet0, count, F);
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int m = warp / 2 * 16 + half * 8 + lane / 4, i = lane % 4 * 2,
                          octet = octet0 + warp % 2 * 4 + j;
                if (m >= count || octet >= octets) continue;
                const i64 at = expert * octets + octet;
                const float2 g = gld<float2>(gains, at * 8 + i);
                float factor[2];
                factors_of(factor, factors, at, i);
                const float a = g.x * factor[0], b = g.y * factor[1];
                gst<float2>(y, (i64)order[first + m] * D + octet * 8 + i,
                            make_float2(acc[j][half * 2] * a, acc[j][half * 2 + 1] * b));
            }
        }
    }
}
EXPORT(experts_down_mma)
