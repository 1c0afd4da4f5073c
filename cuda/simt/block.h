/* block.h - a thread block on the CPU: one fiber per CUDA thread, meetings, the record that a kernel image exports.
 *
 * Shared by the driver and by every kernel image: whatever changes here changes kAbi, and an image that was
 * built against another number is refused. A lane that arrives at a warp operation clears its bit and switches to
 * the next runnable lane; the last to arrive computes the result for all of them. Nothing polls.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <source_location>

typedef uint8_t u8;
typedef int8_t i8;
typedef uint16_t u16;
typedef int16_t i16;
typedef uint32_t u32;
typedef int32_t i32;
typedef unsigned long long u64;
typedef long long i64;

struct dim3 {
    u32 x, y, z;
};

#define SIMT_INLINE inline __attribute__((always_inline))
#define SIMT_API extern "C" __attribute__((visibility("default")))
#define SIMT_UNLIKELY(x) __builtin_expect(!!(x), 0)

#pragma GCC visibility push(hidden)
namespace simt {

constexpr u32 kAbi = 4;
constexpr u32 kMaxThreads = 1024;
constexpr u32 kMaxParams = 32;

enum Mode : u32 { kFast = 0, kCheck = 1, kCount = 2 };
enum Order : u32 { kGreedy = 0, kRising = 1, kFalling = 2 };
enum ParamKind : u8 { kScalar = 0, kPointer = 1, kConstPointer = 2 };

typedef std::source_location Loc;  // one pointer wide; kernels pass it by default argument

/// Where one pointer argument may reach: the allocation it lies in. Made by the driver at each launch.
struct Span {
    const u8 *lo, *hi;
    u32 alloc_id, param;
    void* touched;  // check images: which block touched which byte; null where nothing in the launch may write
};

struct Warp;
struct Worker;

/// One CUDA thread: a cache line.
struct alignas(64) Fiber {
    void* sp;
    Warp* warp;
    Worker* worker;
    u32 lane, wid, tid;
    dim3 index;
    const char* where;  // the operation it waits in; null while it runs
    Loc loc;
};
static_assert(sizeof(Fiber) == 64);

struct Fragment {
    u32 a[4], b[2];
    float d[4];
};

struct alignas(64) Warp {
    u32 runnable, live, arrived, fresh;  // masks of lanes; fresh: not started in this block
    u32 mask[32];
    alignas(64) u64 val[32];
    alignas(64) u64 res[32];
    alignas(64) u32 arg[32];
    Fragment frag[32];
    alignas(64) float wide[16][32];  // several values a lane, one row each
    float totals[16];
    const void* ptr[32];
    Fiber* fib;  // lane 0's
};

struct Barrier {
    u32 need, got;
    u32 wait[32];  // lanes of each warp that wait
    Loc loc;
};

typedef void (*Entry)(void** args);

/// One OS thread's machine: it runs one block at a time.
struct Worker {
    Fiber* fib;
    Warp warp[32];
    u32 warps_run, n_threads, n_warps, n_live, smem_bytes, mode, order;
    u64 block_result;  // of a block-wide reduction
    Barrier bar[16];
    u8* smem;
    dim3 block, grid, block_dim;
    Entry entry;
    void** args;
    const Span* spans;
    const char* kernel;
    void* main_sp;
    u8* stacks;
    u64 next, end, generation;
    bool shared_counter, failed;
    void* async;   // cp.async in flight, a thread each (check and count images)
    void* shadow;  // who touched which byte of shared memory (check images)
    void* tally;   // open warp requests (count images)
    u32 launch;    // number of this launch (check images)
};

/// What EXPORT(name) leaves in an image for cuModuleGetFunction.
struct Export {
    u32 abi, mode;
    const char* name;
    Entry entry;
    u32 n_params;
    u32 size[kMaxParams];
    u8 kind[kMaxParams];
};

// Save rbp and the address to come back to on this stack, leave its pointer in *save, go on at `to`. Everything else
// is clobbered, so the compiler saves just what lives. Needs -mno-red-zone on x86-64.
SIMT_INLINE void switch_stack(void** save, void* to) {
#if defined(__x86_64__)
    asm volatile(
        "leaq 1f(%%rip),%%rax\n\tpushq %%rbp\n\tpushq %%rax\n\tmovq %%rsp,(%0)\n\tmovq %1,%%rsp\n\t"
        "popq %%rax\n\tpopq %%rbp\n\tjmp *%%rax\n1:\n"
        : "+D"(save), "+S"(to)::"rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
          "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
          "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"
#ifdef __AVX512F__
          ,
          "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27",
          "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#endif
    );
#elif defined(__aarch64__)
    register void** save_x0 asm("x0") = save;
    register void* to_x1 asm("x1") = to;
    asm volatile(
        "adr x9,1f\n\tstp x29,x9,[sp,#-16]!\n\tmov x9,sp\n\tstr x9,[x0]\n\tmov sp,x1\n\tldp x29,x9,[sp],#16\n\tbr "
        "x9\n1:\n"
        : "+r"(save_x0), "+r"(to_x1)::"x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13",
          "x14", "x15", "x16", "x17", "x18", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28",
          "x30", "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12",
          "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27",
          "v28", "v29", "v30", "v31");
#else
#error "write a context switch for this machine"
#endif
}

}  // namespace simt
#pragma GCC visibility pop

// Provided by the driver; images leave them undefined.
extern "C" {
extern __attribute__((visibility("default"), tls_model("initial-exec"))) __thread simt::Fiber* simt_current;
__attribute__((visibility("default"))) void simt_idle(
    simt::Fiber* c);  // nobody runnable in my warp, or an order to keep
__attribute__((visibility("default"))) void simt_yield(simt::Fiber* c);  // rising, falling: the next in order
__attribute__((visibility("default"))) void simt_barrier(u32 id, u32 n_threads, void (*last)(simt::Worker*),
                                                         const char* what, simt::Loc loc);
__attribute__((visibility("default"))) void simt_check_meeting(simt::Warp* w, u32 mask, const char* what,
                                                               simt::Loc loc);
__attribute__((visibility("default"))) void simt_warp_passed(simt::Warp* w);
[[noreturn]] __attribute__((visibility("default"), format(printf, 2, 3))) void simt_fault(simt::Loc loc,
                                                                                          const char* text, ...);
}

#pragma GCC visibility push(hidden)
namespace simt {

SIMT_INLINE Fiber* self() { return simt_current; }

SIMT_INLINE void switch_to(Fiber* to) {
    Fiber* c = simt_current;
    simt_current = to;
    switch_stack(&c->sp, to->sp);
}

/// Leave: my runnable bit is already clear.
SIMT_INLINE void next_lane(Fiber* c) {
    Warp* w = c->warp;
    const u32 r = w->runnable;
    if (SIMT_UNLIKELY(r == 0 || c->worker->order != kGreedy)) {
        simt_idle(c);
        return;
    }
    const u32 next = c->lane + 1;
    if (__builtin_expect(next < 32 && (r >> (next & 31) & 1), 1)) {  // a guessed branch, not a chain of loads
        switch_to(c + 1);
        return;
    }
    const u32 higher = r & (~0u << c->lane);
    switch_to(w->fib + __builtin_ctz(higher ? higher : r));
}

/// All lanes of `mask` meet; the last one to come runs op(warp) for everybody. Only lanes of the mask may be written.
template <class F>
SIMT_INLINE void meet(u32 mask, const char* what, Loc loc, F&& op) {
    Fiber* c = simt_current;
    Warp* w = c->warp;
    const u32 bit = 1u << c->lane;
    c->where = what;
    c->loc = loc;
#ifdef SIMT_CHECK
    w->mask[c->lane] = mask;
    simt_check_meeting(w, mask, what, loc);
#endif
    const u32 arrived = w->arrived | bit;
    if ((arrived & mask) == mask) {
        op(w);
        w->arrived = arrived & ~mask;
        w->runnable |= mask;
#if defined(SIMT_CHECK) || defined(SIMT_COUNT)
        simt_warp_passed(w);
#endif
        if (SIMT_UNLIKELY(c->worker->order != kGreedy)) simt_yield(c);
    } else {
        w->arrived = arrived;
        w->runnable &= ~bit;
        next_lane(c);
    }
    c->where = nullptr;
}

template <class T>
SIMT_INLINE u64 pack(T v) {
    static_assert(sizeof(T) <= 8);
    u64 r = 0;
    memcpy(&r, &v, sizeof(T));
    return r;
}
template <class T>
SIMT_INLINE T unpack(u64 r) {
    T v;
    memcpy(&v, &r, sizeof(T));
    return v;
}

}  // namespace simt
#pragma GCC visibility pop
