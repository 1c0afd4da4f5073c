/* router.cu - scores of the routed experts, the top k of them, their weights.
 *
 *   route        s_e = sqrt(softplus(u_e / gate_temp));  picks = the k largest of s_e + bias_e (+ delta_e);
 *                weights_j = scale * s_pick(j) / (sum_i s_pick(i) + 1e-20)      (without the sum where norm = 0)
 *
 * Layout      u: f32 [R, E], bias: f32 [E], delta: f32 [E] of a mounted sidecar, or null; picks: i32 [R, k],
 *             weights: f32 [R, k], by falling sum.
 * Launch      grid R, block 32: a warp a row; 12 E bytes of shared memory. 1 <= k <= min(E, 32).
 * Arithmetic  f32, (s + bias) + delta. Equal sums: the lowest expert number first. NaN ranks below every number, so
 *             picks are always k different experts. The sum over picks runs in pick order.
 * Traffic     reads 4 R E of u, of bias and of delta, writes 8 R k.
 * Why so      384 scores are 12 a lane; k rounds of a warp maximum need no sort and no second kernel.
 */
#include "common.cuh"

/// A float as an unsigned number of the same order; NaN is 1, and 0 is left for "taken".
DEV u32 ordered(float f) {
    const u32 u = __float_as_uint(f);
    if (!(f == f)) return 1u;
    return u >> 31 ? ~u : u | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(32)
    route(gptr<i32> picks, gptr<float> weights, gptr<const float> u, gptr<const float> bias, gptr<const float> delta,
          int E, int k, float gate_temp, float scale, int norm) {
    SMEM_DYN(float, score, 0);
    SMEM_DYN(u32, key, E * 4);  // a lane touches only its own e = lane, lane + 32, ... until the sync below
    SMEM_DYN(float, more, E * 8);
    const int lane = threadIdx.x;
    const i64 row = blockIdx.x;
#pragma unroll 12  // loads alone, so that they travel together: what follows has branches
    for (int e = lane; e < E; e += 32) key[e] = __float_as_uint(bias[e]);
    const bool moved = !(delta == nullptr);
    if (moved) {
#pragma unroll 12
        for (int e = lane; e < E; e += 32) more[e] = delta[e];
    }
    grid_wait();
    grid_release();
#pragma unroll 12
    for (int e = lane; e < E; e += 32) score[e] = u[row * E + e];
    for (int e = lane; e < E; e += 32) {
        const float s = sqrtf(softplus_f(score[e] / gate_temp));
        score[e] = s;
        const float sum = s + __uint_as_float(key[e]);
        key[e] = ordered(moved ? sum + more[e] : sum);
    }
    int mine = 0;  // lane j keeps pick j
    for (int j = 0; j < k; j++) {
        u32 best = 0, at = 0xffffffffu;
        for (int e = lane; e < E; e += 32) {
            const u32 v = key[e];
            if (v > best) best = v, at = e;
        }
        const u32 top = warp_max(best);
        const u32 pick = warp_min(best == top ? at : 0xffffffffu);
        if (pick % 32 == (u32)lane) key[pick] = 0u;
        if (lane == j) mine = (int)pick;
    }
    sync_warp();
    const float s = lane < k ? score[mine] : 0.0f;
    float sum = 0.0f;
    for (int j = 0; j < k; j++) sum += shfl(s, j);
    if (lane >= k) return;
    picks[row * k + lane] = mine;
    weights[row * k + lane] = (norm ? s / (sum + 1e-20f) : s) * scale;
}
EXPORT(route)
