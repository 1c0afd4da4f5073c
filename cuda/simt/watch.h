/* watch.h - what a kernel image of the check and count builds calls around every access, and the references that
 * p[i] gives there. Included by images only.
 */
#pragma once
#include <type_traits>
#include "watched.h"

template <class T>
struct gptr;
template <class T>
struct sptr;

namespace simt {

/// An index that remembers where it was written.
struct At {
    i64 i;
    Loc loc;
    SIMT_INLINE At(i64 i_, Loc l = Loc::current()) : i(i_), loc(l) {}
    SIMT_INLINE At(u64 i_, Loc l = Loc::current()) : i((i64)i_), loc(l) {}
    SIMT_INLINE At(i32 i_, Loc l = Loc::current()) : i(i_), loc(l) {}
    SIMT_INLINE At(u32 i_, Loc l = Loc::current()) : i(i_), loc(l) {}
    SIMT_INLINE At(long i_, Loc l = Loc::current()) : i(i_), loc(l) {}
    SIMT_INLINE At(unsigned long i_, Loc l = Loc::current()) : i((i64)i_), loc(l) {}
    template <class R>
        requires requires { typename R::element; }
    SIMT_INLINE At(R&& r, Loc l = Loc::current()) : i((i64)(typename R::element)(static_cast<R&&>(r))), loc(l) {}
};

template <class V, class T>
SIMT_INLINE std::remove_const_t<V> gload(const T* p, const Span* span, Loc loc) {
    simt_global_access(p, sizeof(V), alignof(V), false, span, loc);
    std::remove_const_t<V> v;
    memcpy(&v, (const void*)p, sizeof(V));
    return v;
}
template <class V, class T>
SIMT_INLINE void gstore(T* p, const Span* span, V v, Loc loc) {
    simt_global_access(p, sizeof(V), alignof(V), true, span, loc);
    memcpy((void*)p, &v, sizeof(V));
}
template <class V>
SIMT_INLINE V sload(const void* p, Loc loc) {
    simt_shared_access(p, sizeof(V), alignof(V), false, loc);
    V v;
    memcpy(&v, p, sizeof(V));
    return v;
}
template <class V>
SIMT_INLINE void sstore(void* p, V v, Loc loc) {
    simt_shared_access(p, sizeof(V), alignof(V), true, loc);
    memcpy(p, &v, sizeof(V));
}

// Usable once, where it was made: `auto r = p[i]` kept for later does not compile when it is used.
#define SIMT_REFERENCE(NAME, FIELDS, LOAD, STORE)                     \
    template <class T>                                                \
    struct NAME {                                                     \
        typedef T element;                                            \
        T* p;                                                         \
        FIELDS Loc loc;                                               \
        SIMT_INLINE T get() const { return LOAD; }                    \
        SIMT_INLINE T set(T v) const {                                \
            STORE;                                                    \
            return v;                                                 \
        }                                                             \
        SIMT_INLINE operator T() && { return get(); }                 \
        SIMT_INLINE T operator=(T v) && { return set(v); }            \
        SIMT_INLINE T operator=(NAME&& o) && { return set(o.get()); } \
        template <class U>                                            \
        SIMT_INLINE T operator+=(U v) && {                            \
            return set((T)(get() + v));                               \
        }                                                             \
        template <class U>                                            \
        SIMT_INLINE T operator-=(U v) && {                            \
            return set((T)(get() - v));                               \
        }                                                             \
        template <class U>                                            \
        SIMT_INLINE T operator*=(U v) && {                            \
            return set((T)(get() * v));                               \
        }                                                             \
        template <class U>                                            \
        SIMT_INLINE T operator/=(U v) && {                            \
            return set((T)(get() / v));                               \
        }                                                             \
        template <class U>                                            \
        SIMT_INLINE T operator|=(U v) && {                            \
            return set((T)(get() | v));                               \
        }                                                             \
        template <class U>                                            \
        SIMT_INLINE T operator&=(U v) && {                            \
            return set((T)(get() & v));                               \
        }                                                             \
        template <class U>                                            \
        SIMT_INLINE T operator^=(U v) && {                            \
            return set((T)(get() ^ v));                               \
        }                                                             \
        SIMT_INLINE T operator++() && { return set((T)(get() + 1)); } \
        SIMT_INLINE T operator--() && { return set((T)(get() - 1)); } \
        SIMT_INLINE T operator++(int) && {                            \
            const T old = get();                                      \
            set((T)(old + 1));                                        \
            return old;                                               \
        }                                                             \
        SIMT_INLINE T operator--(int) && {                            \
            const T old = get();                                      \
            set((T)(old - 1));                                        \
            return old;                                               \
        }

SIMT_REFERENCE(gref, const Span* span;, (gload<T, T>(p, span, loc)), (gstore<T, T>(p, span, v, loc)))
SIMT_INLINE gptr<T> operator&() &&;
};
SIMT_REFERENCE(sref, , (sload<T>(p, loc)), (sstore<T>(p, v, loc)))
SIMT_INLINE sptr<T> operator&() &&;
}
;
#undef SIMT_REFERENCE

}  // namespace simt
