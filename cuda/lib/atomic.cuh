/* atomic.cuh - atomics on integers, by pointer: atomicAdd(p + i, v) or atomicAdd(&p[i], v). Floats have none here:
 * their order would change the sum's bits.
 */
#pragma once
#include "gmem.cuh"
#include "smem.cuh"

#ifndef __CUDACC__

namespace simt {
template <class T, class Op>
SIMT_INLINE T atomic(T* p, Op op) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED), next;
    do next = op(old);
    while (!__atomic_compare_exchange_n(p, &old, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
#ifdef SIMT_WATCHED
template <class T>
SIMT_INLINE T* atomic_target(gptr<T> p, Loc loc) {
    simt_global_atomic(p.p, sizeof(T), p.span, loc);
    return p.p;
}
template <class T>
SIMT_INLINE T* atomic_target(sptr<T> p, Loc loc) {
    simt_shared_atomic(p.p, sizeof(T), loc);
    return p.p;
}
#else
template <class P>
SIMT_INLINE auto atomic_target(P p, Loc) {
    return p.p;
}
template <class T>
    requires(sizeof(T) >= 4)
SIMT_INLINE T* atomic_target(T* p, Loc) {  // the fast build's &p[i]
    return p;
}
#endif
}  // namespace simt

#define SIMT_ATOMIC(NAME, EXPRESSION)                                                     \
    template <class P, class V>                                                           \
    DEV auto NAME(P p, V v SITE) {                                                        \
        auto* target = simt::atomic_target(p, loc);                                       \
        typedef __typeof__(*target + 0) T;                                                \
        static_assert(is_same<T, i32> || is_same<T, u32> || is_same<T, u64>, "integers"); \
        return simt::atomic(target, [=](T old) { return (T)(EXPRESSION); });              \
    }
SIMT_ATOMIC(atomicAdd, old + (T)v)
SIMT_ATOMIC(atomicMax, old < (T)v ? (T)v : old)
SIMT_ATOMIC(atomicMin, old > (T)v ? (T)v : old)
SIMT_ATOMIC(atomicOr, old | (T)v)
SIMT_ATOMIC(atomicAnd, old&(T)v)
SIMT_ATOMIC(atomicExch, ((void)old, (T)v))
#undef SIMT_ATOMIC

#endif
