/* experts_plan.cu - what the routed experts need around their products: order, placement, sums.
 *
 *   experts_plan  the slots p = r k + j sorted by expert (then by p), cut into items of at most `cap` slots;
 *                 total += items, where one is given
 *   vq_place      one matrix from the file's index streams to the blocks of codes.cuh
 *   swiglu        h[r,f] = silu(min(g, limit)) * clamp(u, -limit, limit)
 *   moe_sum       y[r,d] = sum_j y_slots[r,j,d] (rising j) + shared[r,d]
 *
 * Layout      picks: i32 [P]; order: i32 [P]; items: i32 [n, 4] (expert, first place in order, slots, 0), by expert;
 *             n_items: i32 [1]; total: u32 [1] or null. vq_place: main u8 [rows, row_bytes], plane u8
 *             [rows, plane_bytes] or null; out and out_plane start at the matrix's first octet, whose blocks follow
 *             each other; octets are `octet_blocks` blocks apart. g, u, h, y, shared: A [R, F] or [R, D]; y_slots: f32 [R, k, D].
 * Launch      experts_plan: one block of 256, 12 E bytes of shared memory. Others: a thread an element.
 * Arithmetic  f32; one rounding to A. Integers otherwise: nothing depends on the order of threads.
 * Traffic     experts_plan: picks twice a warp of experts (and 4 bytes of total, if any). vq_place: two bytes a code and the plane, writes the blocks.
 *             swiglu: reads 2 R F, writes R F. moe_sum: reads R k D of f32 and R D of A, writes R D.
 * Why so      a few thousand picks sort faster by counting in one block than by any launch more.
 */
#include "common.cuh"
#include "codes.cuh"

constexpr int kPlanThreads = 256;

extern "C" __global__ void __launch_bounds__(kPlanThreads)
    experts_plan(gptr<i32> order, gptr<i32> items, gptr<i32> n_items, gptr<u32> total, gptr<const i32> picks, int P,
                 int E, int cap) {
    SMEM_DYN(i32, count, 0);
    SMEM_DYN(i32, start, E * 4);
    SMEM_DYN(i32, first_item, E * 8);
    const int t = threadIdx.x;
    grid_release();
    for (int e = t; e < E; e += kPlanThreads) {
        int n = 0;
        for (int p = 0; p < P; p++) n += picks[p] == e;
        count[e] = n;
    }
    sync_block();
    if (t == 0) {
        int slots = 0, n = 0;
        for (int e = 0; e < E; e++) {
            start[e] = slots;
            first_item[e] = n;
            slots += count[e];
            n += (count[e] + cap - 1) / cap;
        }
        n_items[0] = n;
        if (total) total[0] += (u32)n;
    }
    sync_block();
    for (int e = t; e < E; e += kPlanThreads) {
        const int n = count[e], at = start[e], item = first_item[e];
        for (int i = 0; i * cap < n; i++) {
            items[(item + i) * 4] = e;
            items[(item + i) * 4 + 1] = at + i * cap;
            items[(item + i) * 4 + 2] = min(cap, n - i * cap);
            items[(item + i) * 4 + 3] = 0;
        }
        int found = 0;
#pragma unroll 8  // read-only loads: they need not wait for the stores to order
        for (int p = 0; p < P; p++) {
            if (gld_nc<i32>(picks, p) == e) order[at + found++] = p;
        }
    }
}
EXPORT(experts_plan)

extern "C" __global__ void __launch_bounds__(256)
    vq_place(gptr<u32> out, gptr<u8> out_plane, gptr<const u8> main, gptr<const u8> plane, int rows, int n_codes,
             int row_bytes, int plane_bytes, int octet_blocks) {
    const int n_blocks = (n_codes + 31) / 32, lane = threadIdx.x & 31;
    const i64 block = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (block >= (i64)(rows / 8) * n_blocks) return;  // no barrier in this kernel
    const int octet = (int)(block / n_blocks), b = (int)(block % n_blocks), j = b * 32 + lane;
    u64 low = 0;
    u32 top = 0, high = 0;
    if (j < n_codes) {
        for (int i = 0; i < 8; i++) {
            const i64 row = (i64)octet * 8 + i, at = row * row_bytes + (i64)j * 12 / 8;
            const u32 pair = main[at] | (u32)main[at + 1] << 8;
            const u64 code = pair >> (j & 1) * 4 & 4095u;
            if (i < 5) low |= code << 12 * i;
            if (i == 5) low |= code << 60, top |= (u32)(code >> 4);
            if (i > 5) top |= (u32)code << (12 * i - 64);
            if (plane_bytes) high |= (u32)(plane[row * plane_bytes + j / 8] >> (j & 7) & 1) << i;
        }
    }
    const i64 to = (i64)octet * octet_blocks + b;
    out[to * kBlockWords + lane] = (u32)low;
    out[to * kBlockWords + 32 + lane] = (u32)(low >> 32);
    out[to * kBlockWords + 64 + lane] = top;
    if (plane_bytes) out_plane[to * 32 + plane_byte(lane)] = (u8)high;
}
EXPORT(vq_place)

template <class A>
DEV void swiglu(gptr<A> h, gptr<const A> g, gptr<const A> u, int F, float limit) {
    const int f = blockIdx.x * 128 + threadIdx.x;
    grid_release();
    if (f >= F) return;  // no barrier in this kernel
    const i64 at = (i64)blockIdx.y * F + f;
    h[at] = from_f32<A>(clamped_swiglu(to_f32(g[at]), to_f32(u[at]), limit));
}

template <class A>
DEV void moe_sum(gptr<A> y, gptr<const float> y_slots, gptr<const A> shared, int k, int D) {
    const int d = blockIdx.x * 128 + threadIdx.x;
    if (d >= D) return;  // no barrier in this kernel
    const i64 row = blockIdx.y;
    float sum = 0.0f;
    for (int j = 0; j < k; j++) sum += y_slots[(row * k + j) * D + d];
    y[row * D + d] = from_f32<A>(sum + to_f32(shared[row * D + d]));
}

#define BY_TYPE(suffix, A)                                                                           \
    extern "C" __global__ void __launch_bounds__(128)                                                \
        swiglu_##suffix(gptr<A> h, gptr<const A> g, gptr<const A> u, int F, float limit) {           \
        swiglu<A>(h, g, u, F, limit);                                                                \
    }                                                                                                \
    EXPORT(swiglu_##suffix)                                                                          \
    extern "C" __global__ void __launch_bounds__(128)                                                \
        moe_sum_##suffix(gptr<A> y, gptr<const float> y_slots, gptr<const A> shared, int k, int D) { \
        moe_sum<A>(y, y_slots, shared, k, D);                                                        \
    }                                                                                                \
    EXPORT(moe_sum_##suffix)

BY_TYPE(bf16, bf16)
BY_TYPE(f32, float)
