/* warp.cuh - meetings of threads: barriers, shuffles, votes, and reductions with a pinned order.
 *
 * A sum over a warp is the xor butterfly 16, 8, 4, 2, 1; over a block the warps' sums are added in rising order. The
 * host computes both in one meeting with the same order, hence the same bits. All 32 lanes (all threads) call.
 */
#pragma once
#include "base.cuh"

#ifdef __CUDACC__

DEV void sync_block() { __syncthreads(); }
DEV void sync_warp(u32 mask = 0xffffffffu) { __syncwarp(mask); }
DEV void bar_sync(int id, int n_threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory"); }
template <class T>
DEV T shfl(T v, int src_lane) {
    return __shfl_sync(0xffffffffu, v, src_lane);
}
template <class T>
DEV T shfl_xor(T v, int lanes) {
    return __shfl_xor_sync(0xffffffffu, v, lanes);
}
template <class T>
DEV T shfl_down(T v, int lanes) {
    return __shfl_down_sync(0xffffffffu, v, (unsigned)lanes);
}
template <class T>
DEV T shfl_up(T v, int lanes) {
    return __shfl_up_sync(0xffffffffu, v, (unsigned)lanes);
}
DEV u32 ballot(bool p) { return __ballot_sync(0xffffffffu, p); }
DEV bool any_lane(bool p) { return __any_sync(0xffffffffu, p); }
DEV bool all_lanes(bool p) { return __all_sync(0xffffffffu, p); }

template <class T>
DEV T warp_sum(T v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}
DEV float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}
DEV float warp_min(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = fminf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}
template <class T>
DEV T warp_max(T v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = max(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}
template <class T>
DEV T warp_min(T v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = min(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}
/// N sums at once, each as warp_sum's.
template <int N>
DEV void warp_sums(float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = warp_sum(v[i]);
}
/// One step of the butterfly for many sums: 2 N of them over pairs of lanes become N, the upper half in the lanes with
/// bit 2 N set.
template <int N>
DEV void halve_sums(float (&v)[16], int lane) {
    const bool high = lane & 2 * N;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float away = high ? v[i] : v[i + N];
        v[i] = (high ? v[i + N] : v[i]) + __shfl_xor_sync(0xffffffffu, away, 2 * N);
    }
}
/// Sixteen sums in the shuffles of one and a half: lane l leaves with warp_sum(v[l / 2]). v is used up.
DEV float warp_sums_spread(float (&v)[16]) {
    const int lane = threadIdx.x & 31;
    halve_sums<8>(v, lane);
    halve_sums<4>(v, lane);
    halve_sums<2>(v, lane);
    halve_sums<1>(v, lane);
    return v[0] + __shfl_xor_sync(0xffffffffu, v[0], 1);
}
/// Like warp_sum within each aligned group of `width` lanes (a power of two): butterfly width/2 .. 1.
DEV float group_sum(float v, int width) {
    for (int o = width >> 1; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}
DEV float group_max(float v, int width) {
    for (int o = width >> 1; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}

template <int THREADS, class T>
DEV T block_sum(T v) {
    static_assert(THREADS % 32 == 0);
    __shared__ T slot[THREADS / 32];
    v = warp_sum(v);
    if ((threadIdx.x & 31) == 0) slot[threadIdx.x >> 5] = v;
    __syncthreads();
    v = slot[0];
#pragma unroll
    for (int w = 1; w < THREADS / 32; w++) v += slot[w];
    __syncthreads();
    return v;
}
template <int THREADS, class T>
DEV T block_max(T v) {
    static_assert(THREADS % 32 == 0);
    __shared__ T slot[THREADS / 32];
    v = warp_max(v);
    if ((threadIdx.x & 31) == 0) slot[threadIdx.x >> 5] = v;
    __syncthreads();
    v = slot[0];
#pragma unroll
    for (int w = 1; w < THREADS / 32; w++) v = max(v, slot[w]);
    __syncthreads();
    return v;
}

#else

DEV void sync_block(simt::Loc loc = simt::Loc::current()) {
    simt_barrier(0, simt_current->worker->n_threads, nullptr, "sync_block", loc);
}
DEV void sync_warp(u32 mask = 0xffffffffu SITE) {
    simt::meet(mask, "sync_warp", loc, [](simt::Warp*) {});
}
DEV void bar_sync(int id, int n_threads SITE) { simt_barrier((u32)id, (u32)n_threads, nullptr, "bar_sync", loc); }

namespace simt {
template <class T, class Source>
SIMT_INLINE T shuffle(T v, int o, const char* what, Loc loc, Source source) {
    Fiber* c = simt_current;
    Warp* w = c->warp;
    w->val[c->lane] = pack(v);
    w->arg[c->lane] = (u32)o;
    meet(0xffffffffu, what, loc, [&](Warp* q) {
        for (int l = 0; l < 32; l++) {
            const int s = source(l, (int)q->arg[l]);
            q->res[l] = q->val[(u32)s < 32u ? s : l];
        }
    });
    return unpack<T>(w->res[c->lane]);
}
}  // namespace simt
template <class T>
DEV T shfl(T v, int src_lane SITE) {
    return simt::shuffle(v, src_lane, "shfl", loc, [](int, int o) { return o & 31; });
}
template <class T>
DEV T shfl_xor(T v, int lanes SITE) {
    return simt::shuffle(v, lanes, "shfl_xor", loc, [](int l, int o) { return l ^ o; });
}
template <class T>
DEV T shfl_down(T v, int lanes SITE) {
    return simt::shuffle(v, lanes, "shfl_down", loc, [](int l, int o) { return l + o; });
}
template <class T>
DEV T shfl_up(T v, int lanes SITE) {
    return simt::shuffle(v, lanes, "shfl_up", loc, [](int l, int o) { return l - o; });
}
DEV u32 ballot(bool p SITE) {
    simt::Fiber* c = simt_current;
    simt::Warp* w = c->warp;
    w->arg[c->lane] = p;
    simt::meet(0xffffffffu, "ballot", loc, [](simt::Warp* q) {
        u32 r = 0;
        for (int l = 0; l < 32; l++) r |= q->arg[l] << l;
        q->res[0] = r;
    });
    return (u32)w->res[0];
}
DEV bool any_lane(bool p SITE) { return ballot(p SITE_ARG) != 0; }
DEV bool all_lanes(bool p SITE) { return ballot(p SITE_ARG) == 0xffffffffu; }

namespace simt {
/// xor butterfly from width/2 down to 1 over 32 values; every lane ends with its group's result.
template <class T, class Op>
SIMT_INLINE void butterfly(T (&a)[32], int width, Op op) {
    for (int o = width >> 1; o; o >>= 1) {
        T b[32];
        for (int l = 0; l < 32; l++) b[l] = op(a[l], a[l ^ o]);
        memcpy(a, b, sizeof a);
    }
}
struct Max {
    template <class T>
    SIMT_INLINE T operator()(T x, T y) const {
        return ::max(x, y);
    }
};
struct Min {
    template <class T>
    SIMT_INLINE T operator()(T x, T y) const {
        return ::min(x, y);
    }
};
struct Add {
    template <class T>
    SIMT_INLINE T operator()(T x, T y) const {
        return (T)(x + y);
    }
};
/// The value that every lane of a 32-wide butterfly ends with: the same pairs are added, and + commutes.
template <class T, class Op>
SIMT_INLINE T tree(const T* values, Op op) {
    T a[16];
    for (int l = 0; l < 16; l++) a[l] = op(values[l], values[l + 16]);
    for (int o = 8; o; o >>= 1)
        for (int l = 0; l < o; l++) a[l] = op(a[l], a[l + o]);
    return a[0];
}
// Results go to res and totals, which only an operation writes: a fast lane may already have left its next value
// elsewhere.
template <class T, class Op>
SIMT_INLINE T reduce(T v, const char* what, Loc loc, Op op) {
    static_assert(sizeof(T) == 4, "warp reductions take 4-byte values");
    Fiber* c = simt_current;
    Warp* w = c->warp;
    w->arg[c->lane] = __builtin_bit_cast(u32, v);
    meet(0xffffffffu, what, loc, [=](Warp* q) {
        T a[32];
        memcpy(a, q->arg, sizeof a);
        q->res[0] = pack(tree(a, op));
    });
    return unpack<T>(w->res[0]);
}
template <class Op>
SIMT_INLINE float reduce_groups(float v, int width, const char* what, Loc loc, Op op) {
    Fiber* c = simt_current;
    Warp* w = c->warp;
    w->arg[c->lane] = __builtin_bit_cast(u32, v);
    meet(0xffffffffu, what, loc, [=](Warp* q) {
        float a[32];
        memcpy(a, q->arg, sizeof a);
        butterfly(a, width, op);
        memcpy(q->res, a, sizeof a);
    });
    float r;
    memcpy(&r, (const char*)w->res + 4 * c->lane, 4);
    return r;
}
template <int N>
SIMT_INLINE void reduce_many(const float (&v)[N], const char* what, Loc loc) {
    static_assert(N <= 16, "at most sixteen sums at once");
    Fiber* c = simt_current;
    Warp* w = c->warp;
    for (int i = 0; i < N; i++) w->wide[i][c->lane] = v[i];
    meet(0xffffffffu, what, loc, [](Warp* q) {
        for (int i = 0; i < N; i++) q->totals[i] = tree(q->wide[i], Add{});
    });
}
// The last thread of the block reduces every warp by the butterfly and the warps in rising order.
template <class T, class Op>
SIMT_INLINE T block_reduce(T v, const char* what, Loc loc, Op) {
    static_assert(sizeof(T) == 4, "block reductions take 4-byte values");
    Fiber* c = simt_current;
    Worker* k = c->worker;
    c->warp->arg[c->lane] = __builtin_bit_cast(u32, v);
    simt_barrier(
        0, k->n_threads,
        [](Worker* q) {
            Op op{};
            T total{};
            for (u32 i = 0; i < q->n_warps; i++) {
                T a[32];
                memcpy(a, q->warp[i].arg, sizeof a);
                const T warp = tree(a, op);
                total = i == 0 ? warp : op(total, warp);
            }
            q->block_result = pack(total);
        },
        what, loc);
    return unpack<T>(k->block_result);
}
}  // namespace simt

template <class T>
DEV T warp_sum(T v SITE) {
    return simt::reduce(v, "warp_sum", loc, simt::Add{});
}
template <class T>
DEV T warp_max(T v SITE) {
    return simt::reduce(v, "warp_max", loc, simt::Max{});
}
template <class T>
DEV T warp_min(T v SITE) {
    return simt::reduce(v, "warp_min", loc, simt::Min{});
}
/// N sums at once, each as warp_sum's: one meeting instead of N.
template <int N>
DEV void warp_sums(float (&v)[N] SITE) {
    simt::reduce_many(v, "warp_sums", loc);
    const simt::Warp* w = simt_current->warp;
    for (int i = 0; i < N; i++) v[i] = w->totals[i];
}
/// Sixteen sums: lane l leaves with warp_sum(v[l / 2]).
DEV float warp_sums_spread(float (&v)[16] SITE) {
    simt::reduce_many(v, "warp_sums_spread", loc);
    return simt_current->warp->totals[simt_current->lane / 2];
}
DEV float group_sum(float v, int width SITE) { return simt::reduce_groups(v, width, "group_sum", loc, simt::Add{}); }
DEV float group_max(float v, int width SITE) { return simt::reduce_groups(v, width, "group_max", loc, simt::Max{}); }
template <int THREADS, class T>
DEV T block_sum(T v SITE) {
    static_assert(THREADS % 32 == 0);
    if (SIMT_UNLIKELY(THREADS != simt_current->worker->n_threads))
        simt_fault(loc, "block_sum<%d> in a block of %u threads", THREADS, simt_current->worker->n_threads);
    return simt::block_reduce(v, "block_sum", loc, simt::Add{});
}
template <int THREADS, class T>
DEV T block_max(T v SITE) {
    static_assert(THREADS % 32 == 0);
    if (SIMT_UNLIKELY(THREADS != simt_current->worker->n_threads))
        simt_fault(loc, "block_max<%d> in a block of %u threads", THREADS, simt_current->worker->n_threads);
    return simt::block_reduce(v, "block_max", loc, simt::Max{});
}

#endif
