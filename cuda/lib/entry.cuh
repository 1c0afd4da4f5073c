/* entry.cuh - EXPORT(kernel) on the host: the record by which cuModuleGetFunction finds it, with the sizes and kinds
 * of its parameters deduced from its signature.
 */
#pragma once
#include "gmem.cuh"

#ifndef __CUDACC__

namespace simt {

#if defined(SIMT_CHECK)
constexpr u32 kImageMode = kCheck;
#elif defined(SIMT_COUNT)
constexpr u32 kImageMode = kCount;
#else
constexpr u32 kImageMode = kFast;
#endif

template <class A>
struct Param {
    static_assert(!__is_class(A) || __is_trivially_copyable(A));
    static constexpr u8 kind = kScalar;
    static constexpr u32 size = sizeof(A);
    SIMT_INLINE static A get(const void* p, const Span*) {
        A a;
        memcpy(&a, p, sizeof(A));
        return a;
    }
};
template <class T>
struct Param<T*> {
    static_assert(sizeof(T) == 0, "a kernel takes gptr<T>, not T*");
};
template <class T>
struct Param<gptr<T>> {
    static constexpr u8 kind = is_const<T> ? kConstPointer : kPointer;
    static constexpr u32 size = 8;
    SIMT_INLINE static gptr<T> get(const void* p, const Span* span) {
        u64 address;
        memcpy(&address, p, 8);
        return make_gptr<T>(address, span);
    }
};

template <auto KERNEL, class F, class Indices>
struct Glue;
template <int... I>
struct Indices {};
template <auto KERNEL, class... A, int... I>
struct Glue<KERNEL, void (*)(A...), Indices<I...>> {
    static_assert(sizeof...(A) <= kMaxParams, "too many kernel parameters");
    static void call(void** args) {
        [[maybe_unused]] const Span* spans = simt_current->worker->spans;
        KERNEL(Param<A>::get(args[I], spans + I)...);
    }
    static constexpr Export record(const char* name) {
        return Export{kAbi, kImageMode, name, &call, (u32)sizeof...(A), {Param<A>::size...}, {Param<A>::kind...}};
    }
};
template <class... A>
Indices<__integer_pack(sizeof...(A))...> indices_of(void (*)(A...));

}  // namespace simt

#define EXPORT(kernel)                                                                                \
    extern "C" {                                                                                      \
    extern __attribute__((visibility("default"))) const simt::Export kernel##__simt;                  \
    const simt::Export kernel##__simt =                                                               \
        simt::Glue<&kernel, decltype(&kernel), decltype(simt::indices_of(&kernel))>::record(#kernel); \
    }

#endif
