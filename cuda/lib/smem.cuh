/* smem.cuh - shared memory: sarr<T, N> inside a struct that SMEM places, sptr<T> into it, vector accesses.
 *
 * A kernel's dynamic shared memory is one struct; its size is the same under both compilers. In the check build every
 * access is held against the block's shared memory, poison and the other threads' accesses since the last barrier.
 */
#pragma once
#include "base.cuh"

#ifdef __CUDACC__

template <class T>
using sptr = T*;
template <class T, int N>
struct alignas(16) sarr {
    T v[N];
    DEV T& operator[](i64 i) { return v[i]; }
    DEV const T& operator[](i64 i) const { return v[i]; }
    DEV T* operator+(i64 n) { return v + n; }
};
template <class T>
DEV T* shared_base(T* p) {
    return p;
}
template <class T, int N>
DEV T* shared_base(sarr<T, N>& a) {
    return a.v;
}
template <class V, class S>
DEV V sld(S&& s, i64 i) {
    return *reinterpret_cast<const V*>(shared_base(s) + i);
}
template <class V, class S>
DEV void sst(S&& s, i64 i, V v) {
    *reinterpret_cast<V*>(shared_base(s) + i) = v;
}
template <class U, class T>
DEV U* scast(T* p) {
    return reinterpret_cast<U*>(p);
}
DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
#define SMEM(S, name) S& name = *reinterpret_cast<S*>(dynamic_shared_memory)
#define SMEM_DYN(T, name, byte_offset) T* name = reinterpret_cast<T*>(dynamic_shared_memory + (byte_offset))

#else

#if defined(SIMT_CHECK) || defined(SIMT_COUNT)
#include "../simt/watch.h"
#define SIMT_WATCHED 1

template <class T>
struct sptr {
    T* p;
    sptr() = default;
    SIMT_INLINE explicit sptr(T* raw) : p(raw) {}
    SIMT_INLINE simt::sref<T> operator[](simt::At i) const { return {p + i.i, i.loc}; }
    SIMT_INLINE sptr operator+(i64 n) const { return sptr(p + n); }
    SIMT_INLINE sptr operator-(i64 n) const { return sptr(p - n); }
    SIMT_INLINE sptr& operator+=(i64 n) {
        p += n;
        return *this;
    }
};
template <class T>
SIMT_INLINE sptr<T> simt::sref<T>::operator&() && {
    return sptr<T>(p);
}
template <class T, int N>
struct alignas(16) sarr {
    T v[N];
    SIMT_INLINE simt::sref<T> operator[](simt::At i) {
        if (SIMT_UNLIKELY((u64)i.i >= (u64)N))
            simt_fault(i.loc, "shared memory index %lld is outside an array of %d", i.i, N);
        return {v + i.i, i.loc};
    }
    SIMT_INLINE sptr<T> operator+(i64 n) { return sptr<T>(v + n); }
    SIMT_INLINE operator sptr<T>() { return sptr<T>(v); }
};
#else
template <class T>
struct sptr {
    T* p;
    sptr() = default;
    SIMT_INLINE explicit sptr(T* raw) : p(raw) {}
    SIMT_INLINE T& operator[](i64 i) const { return p[i]; }
    SIMT_INLINE sptr operator+(i64 n) const { return sptr(p + n); }
    SIMT_INLINE sptr operator-(i64 n) const { return sptr(p - n); }
    SIMT_INLINE sptr& operator+=(i64 n) {
        p += n;
        return *this;
    }
};
template <class T, int N>
struct alignas(16) sarr {
    T v[N];
    SIMT_INLINE T& operator[](i64 i) { return v[i]; }
    SIMT_INLINE sptr<T> operator+(i64 n) { return sptr<T>(v + n); }
    SIMT_INLINE operator sptr<T>() { return sptr<T>(v); }
};
#endif

template <class T>
DEV T* shared_base(sptr<T> p) {
    return p.p;
}
template <class T, int N>
DEV T* shared_base(sarr<T, N>& a) {
    return a.v;
}
template <class U, class T>
DEV sptr<U> scast(sptr<T> p) {
    return sptr<U>(reinterpret_cast<U*>(p.p));
}
template <class U, class T, int N>
DEV sptr<U> scast(sarr<T, N>& a) {
    return sptr<U>(reinterpret_cast<U*>(a.v));
}
template <class V, class S>
DEV V sld(S&& s, i64 i SITE) {
#ifdef SIMT_WATCHED
    return simt::sload<V>(shared_base(s) + i, loc);
#else
    (void)loc;
    return *reinterpret_cast<const V*>(shared_base(s) + i);
#endif
}
template <class V, class S>
DEV void sst(S&& s, i64 i, V v SITE) {
#ifdef SIMT_WATCHED
    simt::sstore<V>(shared_base(s) + i, v, loc);
#else
    (void)loc;
    *reinterpret_cast<V*>(shared_base(s) + i) = v;
#endif
}

namespace simt {
SIMT_INLINE u8* shared_memory(u64 end, Loc loc = Loc::current()) {
    Worker* k = simt_current->worker;
    if (SIMT_UNLIKELY(end > k->smem_bytes))
        simt_fault(loc, "the kernel lays out %llu bytes of shared memory, the launch gave it %u", end, k->smem_bytes);
    return k->smem;
}
}  // namespace simt
#define SMEM(S, name) S& name = *reinterpret_cast<S*>(simt::shared_memory(sizeof(S)))
#define SMEM_DYN(T, name, byte_offset) \
    sptr<T> name(reinterpret_cast<T*>(simt::shared_memory((u64)(byte_offset)) + (byte_offset)))

#endif
