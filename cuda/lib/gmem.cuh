/* gmem.cuh - global memory: gptr<T> and the vector accesses through it.
 *
 * On the GPU gptr<T> is T*. On the host it is a class: in the fast build one pointer and no more; in the check and
 * count builds it knows the allocation of the launch argument that it came from, and each access is bounds-checked
 * and counted with its place in the source. A raw dereference does not compile there, so nothing escapes.
 * gld_nc is for memory that nobody writes while the kernel runs: in a kernel that is launched ahead, weights alone.
 */
#pragma once
#include "base.cuh"

#ifdef __CUDACC__

template <class T>
using gptr = T*;
template <class U, class T>
DEV typename like_t<U, T>::type* gcast(T* p) {
    return reinterpret_cast<typename like_t<U, T>::type*>(p);
}
template <class V, class T>
DEV V gld(T* p, i64 i) {
    return *reinterpret_cast<const V*>(p + i);
}
template <class V, class T>
DEV V gld_nc(T* p, i64 i) {
    return __ldg(reinterpret_cast<const V*>(p + i));
}
template <class V, class T>
DEV void gst(T* p, i64 i, V v) {
    *reinterpret_cast<V*>(p + i) = v;
}

#elif !defined(SIMT_CHECK) && !defined(SIMT_COUNT)

template <class T>
struct gptr {
    T* p;
    gptr() = default;
    SIMT_INLINE explicit gptr(T* raw) : p(raw) {}
    SIMT_INLINE operator gptr<const T>() const
        requires(!is_const<T>)
    {
        return gptr<const T>(p);
    }
    SIMT_INLINE T& operator[](i64 i) const { return p[i]; }
    SIMT_INLINE gptr operator+(i64 n) const { return gptr(p + n); }
    SIMT_INLINE gptr operator-(i64 n) const { return gptr(p - n); }
    SIMT_INLINE gptr& operator+=(i64 n) {
        p += n;
        return *this;
    }
    SIMT_INLINE explicit operator bool() const { return p != nullptr; }
    SIMT_INLINE bool operator==(decltype(nullptr)) const { return p == nullptr; }
};
template <class U, class T>
DEV gptr<typename like_t<U, T>::type> gcast(gptr<T> p) {
    return gptr<typename like_t<U, T>::type>(reinterpret_cast<typename like_t<U, T>::type*>(p.p));
}
template <class V, class T>
DEV V gld(gptr<T> p, i64 i) {
    return *reinterpret_cast<const V*>(p.p + i);
}
template <class V, class T>
DEV V gld_nc(gptr<T> p, i64 i) {
    return *reinterpret_cast<const V*>(p.p + i);
}
template <class V, class T>
DEV void gst(gptr<T> p, i64 i, V v) {
    static_assert(!is_const<T>, "a store through a gptr<const T>");
    *reinterpret_cast<V*>(p.p + i) = v;
}
namespace simt {
template <class T>
SIMT_INLINE gptr<T> make_gptr(u64 address, const Span*) {
    return gptr<T>(reinterpret_cast<T*>(address));
}
}  // namespace simt

#else
#include "../simt/watch.h"

template <class T>
struct gptr {
    T* p;
    const simt::Span* span;
    gptr() = default;
    SIMT_INLINE explicit gptr(T* raw, const simt::Span* s) : p(raw), span(s) {}
    SIMT_INLINE operator gptr<const T>() const
        requires(!is_const<T>)
    {
        return gptr<const T>(p, span);
    }
    SIMT_INLINE auto operator[](simt::At i) const {
        if constexpr (is_const<T>) {
            return simt::gload<T, T>(p + i.i, span, i.loc);
        } else {
            return simt::gref<T>{p + i.i, span, i.loc};
        }
    }
    SIMT_INLINE gptr operator+(i64 n) const { return gptr(p + n, span); }
    SIMT_INLINE gptr operator-(i64 n) const { return gptr(p - n, span); }
    SIMT_INLINE gptr& operator+=(i64 n) {
        p += n;
        return *this;
    }
    SIMT_INLINE explicit operator bool() const { return p != nullptr; }
    SIMT_INLINE bool operator==(decltype(nullptr)) const { return p == nullptr; }
};
template <class T>
SIMT_INLINE gptr<T> simt::gref<T>::operator&() && {
    return gptr<T>(p, span);
}
template <class U, class T>
DEV gptr<typename like_t<U, T>::type> gcast(gptr<T> p) {
    return gptr<typename like_t<U, T>::type>(reinterpret_cast<typename like_t<U, T>::type*>(p.p), p.span);
}
template <class V, class T>
DEV V gld(gptr<T> p, i64 i SITE) {
    return simt::gload<V, T>(p.p + i, p.span, loc);
}
template <class V, class T>
DEV V gld_nc(gptr<T> p, i64 i SITE) {
    simt_read_only(p.span, loc);
    return simt::gload<V, T>(p.p + i, p.span, loc);
}
template <class V, class T>
DEV void gst(gptr<T> p, i64 i, V v SITE) {
    static_assert(!is_const<T>, "a store through a gptr<const T>");
    simt::gstore<V, T>(p.p + i, p.span, v, loc);
}
namespace simt {
template <class T>
SIMT_INLINE gptr<T> make_gptr(u64 address, const Span* span) {
    return gptr<T>(reinterpret_cast<T*>(address), span);
}
}  // namespace simt
#endif
