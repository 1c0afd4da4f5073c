/* base.cuh - integer names, vector structs, DEV, EXPORT: what both compilers must agree on before anything else. */
#pragma once

#ifdef __CUDACC__

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#define DEV __device__ __forceinline__
#define EXPORT(name)
#define SITE
#define SITE_ARG

#else

#include "../simt/block.h"

#pragma GCC visibility push(hidden)
#define __global__ __attribute__((visibility("hidden")))
#define __device__
#define __host__
#define __forceinline__ SIMT_INLINE
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define DEV SIMT_INLINE
// A wrapper that meets other threads, or touches memory, says where it was called from.
#define SITE , ::simt::Loc loc = ::simt::Loc::current()
#define SITE_ARG , loc

#define threadIdx (simt_current->index)
#define blockIdx (simt_current->worker->block)
#define blockDim (simt_current->worker->block_dim)
#define gridDim (simt_current->worker->grid)

struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) int2 {
    i32 x, y;
};
struct alignas(16) int4 {
    i32 x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
DEV uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
DEV uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
DEV int2 make_int2(i32 x, i32 y) { return {x, y}; }
DEV int4 make_int4(i32 x, i32 y, i32 z, i32 w) { return {x, y, z, w}; }
DEV float2 make_float2(float x, float y) { return {x, y}; }
DEV float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

DEV u32 __float_as_uint(float f) { return __builtin_bit_cast(u32, f); }
DEV float __uint_as_float(u32 u) { return __builtin_bit_cast(float, u); }
DEV i32 __float_as_int(float f) { return __builtin_bit_cast(i32, f); }
DEV float __int_as_float(i32 i) { return __builtin_bit_cast(float, i); }
DEV int __popc(u32 x) { return __builtin_popcount(x); }
DEV int __popcll(u64 x) { return __builtin_popcountll(x); }
DEV int __ffs(int x) { return __builtin_ffs(x); }
DEV int __ffsll(i64 x) { return __builtin_ffsll(x); }
DEV int __clz(int x) { return x ? __builtin_clz((u32)x) : 32; }
DEV int __clzll(i64 x) { return x ? __builtin_clzll((u64)x) : 64; }
DEV u32 __brev(u32 x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
}
DEV u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }

#define SIMT_MINMAX(T)                            \
    DEV T min(T a, T b) { return b < a ? b : a; } \
    DEV T max(T a, T b) { return a < b ? b : a; }
SIMT_MINMAX(i32)
SIMT_MINMAX(u32)
SIMT_MINMAX(i64)
SIMT_MINMAX(u64)
SIMT_MINMAX(long)
SIMT_MINMAX(unsigned long)
#undef SIMT_MINMAX

// libm's would be calls; and PTX orders -0 below +0 and prefers the number to the NaN.
DEV float simt_fmaxf(float a, float b) {
    if (a != a) return b;
    if (b != b) return a;
    if (a > b) return a;
    if (b > a) return b;
    return __uint_as_float(__float_as_uint(a) & __float_as_uint(b));
}
DEV float simt_fminf(float a, float b) {
    if (a != a) return b;
    if (b != b) return a;
    if (a < b) return a;
    if (b < a) return b;
    return __uint_as_float(__float_as_uint(a) | __float_as_uint(b));
}
#define fmaxf simt_fmaxf
#define fminf simt_fminf
DEV float min(float a, float b) { return simt_fminf(a, b); }
DEV float max(float a, float b) { return simt_fmaxf(a, b); }

#endif

/// Eight bits of name for a storage type: the bits are in v; no arithmetic.
struct bf16 {
    u16 v;
};
struct f16 {
    u16 v;
};

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

template <class T>
struct remove_const_t {
    typedef T type;
};
template <class T>
struct remove_const_t<const T> {
    typedef T type;
};
template <class T>
constexpr bool is_const = false;
template <class T>
constexpr bool is_const<const T> = true;
/// U with the constness of T.
template <class U, class T>
struct like_t {
    typedef U type;
};
template <class U, class T>
struct like_t<U, const T> {
    typedef const U type;
};
