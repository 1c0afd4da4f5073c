/* block.cpp - the machine: workers, each with 1,024 fibers, and the order in which threads run.
 *
 * A worker runs one block at a time. Fibers live for ever: between blocks each is parked in fiber_main. A thread that
 * ends without ever having waited hands its stack to the next one, so plain kernels do not switch at all. Faults leave
 * the fibers where they are; their stacks are rebuilt before the next launch.
 */
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <atomic>
#include <thread>
#include "driver.h"

__attribute__((visibility("default"), tls_model("initial-exec"))) __thread simt::Fiber* simt_current;

namespace simt {
namespace {

constexpr size_t kStackBytes = 64 << 10, kGuardBytes = 4096;
constexpr u64 kAwakeNs = 100000;
constexpr size_t kStackSlot = kStackBytes + kGuardBytes;

struct Pool {
    std::vector<Worker*> workers;
    u32 n_threads_started = 0, n_wanted = 1;
    Order order = kGreedy;
    std::atomic<u32> generation{0};
    std::atomic<u64> ticket{0};  // generation << 32 | next block
    std::atomic<u64> n_done{0};
    std::atomic<u64> n_blocks{0};
    Job job{};
};
Pool& pool() {
    static Pool& p = *[] {  // never destroyed: threads outlive main
        Pool* made = new Pool;
        made->workers.reserve(64);  // threads read it while it grows
        return made;
    }();
    return p;
}
std::mutex& fault_lock() {
    static std::mutex& m = *new std::mutex;
    return m;
}
std::string& fault_text() {
    static std::string& s = *new std::string;
    return s;
}

u64 now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000u + (u64)t.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

__attribute__((noinline)) Fiber* current() { return simt_current; }

bool take_ticket(u32 generation, u64 n_blocks, u64& block) {
    auto& p = pool();
    u64 v = p.ticket.load(std::memory_order_acquire);
    do {
        block = v & 0xffffffffu;
        if (v >> 32 != generation || block >= n_blocks) return false;
    } while (!p.ticket.compare_exchange_weak(v, v + 1, std::memory_order_acq_rel));
    return true;
}

bool next_block(Worker* k) {
    u64 i;
    if (k->shared_counter) {
        if (!take_ticket((u32)k->generation, k->end, i)) return false;
    } else {
        i = k->next++;
        if (i >= k->end) return false;
    }
    const u64 x = k->grid.x, y = k->grid.y;
    k->block = {(u32)(i % x), (u32)(i / x % y), (u32)(i / (x * y))};
    return true;
}

void begin_block(Worker* k) {
    const u32 n = k->n_threads;
    k->n_live = n;
    k->warps_run = k->n_warps == 32 ? ~0u : (1u << k->n_warps) - 1;
    for (u32 i = 0; i < k->n_warps; i++) {
        const u32 left = n - 32 * i;
        Warp& w = k->warp[i];
        w.runnable = w.live = w.fresh = left >= 32 ? ~0u : (1u << left) - 1;
        w.arrived = 0;
    }
    if (k->mode == kCheck) check_block_begin(k);
}

Fiber* first_fiber(Worker* k) { return k->order == kFalling ? k->fib + (k->n_threads - 1) : k->fib; }

void end_block(Worker* k) {
    if (k->mode == kCount) count_block_end(k);
    if (k->shared_counter) pool().n_done.fetch_add(1, std::memory_order_acq_rel);
}

__attribute__((noinline)) void fiber_main() {
    for (;;) {
        Fiber* c = current();
        Worker* k = c->worker;
        Warp* w = c->warp;
        const u32 bit = 1u << c->lane;
        w->fresh &= ~bit;
        c->where = nullptr;
        k->entry(k->args);
        if (k->mode == kCheck) check_thread_exit(c);
        w->runnable &= ~bit;
        w->live &= ~bit;
        if (--k->n_live == 0) {
            end_block(k);
            if (next_block(k)) {
                begin_block(k);
                Fiber* f = first_fiber(k);
                if (f != c) {  // every fiber is parked alike: take its name, leave it this one's context
                    c->sp = f->sp;
                    simt_current = f;
                }
                continue;
            }
            switch_stack(&c->sp, k->main_sp);
            continue;  // resumed by the next launch
        }
        if (c->lane < 31 && (w->runnable & w->fresh) >> (c->lane + 1) & 1 && k->order == kGreedy) {
            Fiber* next = c + 1;
            void* parked = next->sp;
            c->sp = parked;
            simt_current = next;
            continue;
        }
        next_lane(c);
    }
}

void* parked_context(u8* top) {
    u64* s = (u64*)((uintptr_t)top & ~15ull);
#if defined(__x86_64__)
    *--s = 0;
    *--s = 0;
    *--s = (u64)&fiber_main;  // [entry][rbp], and a zero where a return address would be: sp = 8 mod 16 at entry
#else
    *--s = (u64)&fiber_main;
    *--s = 0;  // [x29][entry]
#endif
    return s;
}

void park_all(Worker* k) {
    for (u32 i = 0; i < kMaxThreads; i++) {
        // tops at different offsets within a page: at a power-of-two stride they would share cache sets
        u8* top = k->stacks + kStackSlot * (i + 1) - (i * 320) % 4096;
        k->fib[i].sp = parked_context(top);
        k->fib[i].where = nullptr;
    }
    for (auto& b : k->bar) b = Barrier{};
}

Worker* make_worker() {
    Worker* k = (Worker*)aligned_alloc(64, (sizeof(Worker) + 63) & ~63ull);
    memset((void*)k, 0, sizeof *k);
    k->fib = (Fiber*)aligned_alloc(64, sizeof(Fiber) * kMaxThreads);
    memset((void*)k->fib, 0, sizeof(Fiber) * kMaxThreads);
    k->stacks = (u8*)mmap(nullptr, kStackSlot * kMaxThreads, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    u8* m = (u8*)mmap(nullptr, kMaxSmem + 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (k->stacks == MAP_FAILED || m == MAP_FAILED) {
        fprintf(stderr, "ds4 CPU driver: no address space for a worker's stacks\n");
        abort();
    }
    for (u32 i = 0; i < kMaxThreads; i++) mprotect(k->stacks + kStackSlot * i, kGuardBytes, PROT_NONE);
    k->smem = m;
    for (u32 i = 0; i < kMaxThreads; i++) {
        Fiber& f = k->fib[i];
        f.worker = k, f.lane = i & 31, f.wid = i >> 5, f.tid = i, f.warp = &k->warp[i >> 5];
    }
    for (u32 i = 0; i < 32; i++) k->warp[i].fib = k->fib + 32 * i;
    park_all(k);
    return k;
}

/// Run blocks on this worker until there are none left. The first block is given, or taken here.
__attribute__((noinline)) void work(Worker* k, const Job& j, bool have_block) {
    k->order = pool().order;
    if (k->block_dim.x != j.block.x || k->block_dim.y != j.block.y || k->block_dim.z != j.block.z) {
        k->block_dim = j.block;
        k->n_threads = j.block.x * j.block.y * j.block.z;
        k->n_warps = (k->n_threads + 31) / 32;
        for (u32 i = 0; i < k->n_threads; i++)
            k->fib[i].index = {i % j.block.x, i / j.block.x % j.block.y, i / (j.block.x * j.block.y)};
    }
    k->grid = j.grid, k->entry = j.entry, k->args = j.args, k->smem_bytes = j.smem, k->mode = j.mode;
    k->spans = j.spans, k->kernel = j.kernel, k->failed = false;
    if (j.mode == kCheck) check_prepare(k);
    if (j.mode == kCount) count_launch_begin(k, *j.count, j.n_params);
    if (!have_block && !next_block(k)) return;
    begin_block(k);
    Fiber* f = first_fiber(k);
    simt_current = f;
    switch_stack(&k->main_sp, f->sp);
    simt_current = nullptr;
    if (j.mode == kCount) count_launch_end(k);
    if (k->failed) {
        if (j.mode == kCheck) check_reset(k);
        park_all(k);
        if (k->shared_counter) {  // nobody starts another block; those not started count as done, as does ours
            auto& p = pool();
            const u64 old = p.ticket.exchange((u64)(u32)k->generation << 32 | k->end, std::memory_order_acq_rel);
            p.n_done.fetch_add(k->end - (old & 0xffffffffu) + 1, std::memory_order_acq_rel);
        }
    }
}

void worker_main(u32 id) {
    auto& p = pool();
    u32 seen = 0;
    for (;;) {
        u32 g;
        // A replay's launches follow within microseconds and waking takes far longer: stay awake for a while, then sleep.
        u64 tired = 0;
        while ((g = p.generation.load(std::memory_order_acquire)) == seen) {
            for (u32 i = 0; i < 32 && p.generation.load(std::memory_order_relaxed) == seen; i++) relax();
            const u64 t = now_ns();
            if (tired == 0) tired = t + kAwakeNs;
            if (t > tired) p.generation.wait(seen, std::memory_order_acquire);
        }
        seen = g;
        u64 block;
        // A ticket keeps the job alive: the caller waits until every block handed out is done.
        const u64 n = p.n_blocks.load(std::memory_order_acquire);
        if (id >= p.n_wanted || !take_ticket(g, n, block)) continue;
        Worker* k = p.workers[id];
        const Job job = p.job;
        k->generation = g, k->end = n, k->shared_counter = true;
        const u64 x = job.grid.x, y = job.grid.y;
        k->block = {(u32)(block % x), (u32)(block / x % y), (u32)(block / (x * y))};
        work(k, job, true);
    }
}

const char* file_of(Loc loc) {
    const char* slash = strrchr(loc.file_name(), '/');
    return slash ? slash + 1 : loc.file_name();
}

/// Ends the current block: note the fault, go back to the stack that launched.
[[noreturn]] void give_up(Worker* k, const std::string& text) {
    {
        std::lock_guard<std::mutex> g(fault_lock());
        if (fault_text().empty()) fault_text() = text;
    }
    k->failed = true;
    void* left;
    switch_stack(&left, k->main_sp);
    __builtin_unreachable();
}

[[noreturn]] __attribute__((noinline)) void deadlock(Worker* k) {
    std::map<std::string, u32> waits;
    u32 at_barriers = 0;
    for (u32 i = 0; i < k->n_threads; i++) {
        const Fiber& f = k->fib[i];
        if (!(f.warp->live >> f.lane & 1)) continue;
        waits[std::string(f.where ? f.where : "nothing") + " (" + file_of(f.loc) + ":" +
              std::to_string(f.loc.line()) + ")"]++;
        for (auto& b : k->bar) at_barriers += b.got && (b.wait[f.wid] >> f.lane & 1);
    }
    char head[200];
    snprintf(head, sizeof head, "%s: %s in block (%u,%u,%u): ", k->kernel,
             at_barriers ? "divergent barrier" : "divergent warp operation", k->block.x, k->block.y, k->block.z);
    std::string text = head;
    for (auto& [where, n] : waits)
        text += std::to_string(n) + " of " + std::to_string(k->n_threads) + " threads wait in " + where + ", ";
    const u32 returned = k->n_threads - k->n_live;
    if (returned)
        text += std::to_string(returned) + " returned";
    else
        text.resize(text.size() - 2);
    give_up(k, text);
}

/// Rising: the next higher runnable thread, else the lowest; falling: the mirror image. Null if nobody can run.
Fiber* next_in_order(Worker* k, u32 tid) {
    const u32 n = k->n_threads;
    for (u32 step = 1; step <= n; step++) {
        const u32 t = k->order == kRising ? (tid + step) % n : (tid + n - step) % n;
        const u32 r = k->warp[t >> 5].runnable;
        if (r >> (t & 31) & 1) return k->fib + t;
        if (r == 0) {  // skip the rest of the warp
            const u32 lane = t & 31;
            const u32 rest = k->order == kRising ? 31 - lane : lane;
            if (k->order == kFalling || t + rest < n) step += rest;
        }
    }
    return nullptr;
}

}  // namespace

u32 n_workers_for(const Job& job) {
    const u64 n = (u64)job.grid.x * job.grid.y * job.grid.z;
    if (job.mode != kFast || job.alone || n >= 0xffffffffu) return 1;
    return n < pool().n_wanted ? (u32)n : pool().n_wanted;
}

bool run_job(const Job& job, std::string& fault) {
    auto& p = pool();
    if (p.workers.empty()) p.workers.push_back(make_worker());
    const u64 n = (u64)job.grid.x * job.grid.y * job.grid.z;
    Worker* k = p.workers[0];
    fault_text().clear();
    k->next = 0, k->end = n, k->shared_counter = false;
    if (n_workers_for(job) > 1) {
        const u32 g = p.generation.load(std::memory_order_relaxed) + 1;
        // The last job's ticket goes first: a worker that still holds its generation must not take one of these blocks.
        p.ticket.store((u64)g << 32 | 0xffffffffu, std::memory_order_release);
        p.job = job;
        p.n_blocks.store(n, std::memory_order_release);
        p.n_done.store(0, std::memory_order_relaxed);
        p.ticket.store((u64)g << 32, std::memory_order_release);
        p.generation.store(g, std::memory_order_release);
        p.generation.notify_all();
        k->generation = g, k->shared_counter = true;
        work(k, job, false);
        for (u32 spins = 0; p.n_done.load(std::memory_order_acquire) < n; spins++) {
            if (spins < 200)
                relax();
            else
                sched_yield();
        }
    } else {
        work(k, job, false);
    }
    std::lock_guard<std::mutex> held(fault_lock());
    fault = fault_text();
    return fault.empty();
}

int set_workers(int n) {
    auto& p = pool();
    if (n < 1 || n > 64) return CUDA_ERROR_INVALID_VALUE;
    while ((int)p.workers.size() < n) p.workers.push_back(make_worker());
    p.n_wanted = (u32)n;
    while ((int)p.n_threads_started < n - 1) std::thread(worker_main, ++p.n_threads_started).detach();
    return CUDA_SUCCESS;
}

int set_order(Order order) {
    pool().order = order;
    return CUDA_SUCCESS;
}

}  // namespace simt

using namespace simt;

void simt_idle(Fiber* c) {
    Worker* k = c->worker;
    if (k->order != kGreedy) {
        Fiber* f = next_in_order(k, c->tid);
        if (!f) deadlock(k);
        switch_to(f);
        return;
    }
    k->warps_run &= ~(1u << c->wid);
    if (!k->warps_run) deadlock(k);
    const u32 r = k->warps_run, higher = r & (~0u << c->wid);
    Warp* w = &k->warp[__builtin_ctz(higher ? higher : r)];
    switch_to(w->fib + __builtin_ctz(w->runnable));
}

void simt_yield(Fiber* c) {
    Fiber* f = next_in_order(c->worker, c->tid);
    if (f && f != c) switch_to(f);
}

__attribute__((hot)) void simt_barrier(u32 id, u32 n_threads, void (*last)(Worker*), const char* what, Loc loc) {
    Fiber* c = simt_current;
    Worker* k = c->worker;
    if (SIMT_UNLIKELY(id > 15)) simt_fault(loc, "there is no barrier %u: they are 0 to 15", id);
    if (SIMT_UNLIKELY(n_threads > k->n_threads || n_threads == 0))
        simt_fault(loc, "barrier %u for %u threads in a block of %u", id, n_threads, k->n_threads);
    Barrier& b = k->bar[id];
    c->where = what;
    c->loc = loc;
    if (b.got == 0) {
        b.need = n_threads;
        b.loc = loc;
    } else if (SIMT_UNLIKELY(b.need != n_threads)) {
        simt_fault(loc, "barrier %u is for %u threads here, for %u at line %u", id, n_threads, b.need, b.loc.line());
    } else if (SIMT_UNLIKELY(k->mode == kCheck && (b.loc.line() != loc.line() || b.loc.column() != loc.column()))) {
        simt_fault(loc, "divergent barrier: some threads wait at line %u, this one came to line %u", b.loc.line(),
                   loc.line());
    }
    if (++b.got == n_threads) {
        if (last) last(k);
        b.got = 0;
        b.wait[c->wid] |= 1u << c->lane;
        if (k->mode != kFast) {
            if (k->mode == kCheck)
                check_barrier(k, b);
            else
                for (u32 i = 0; i < k->n_warps; i++)
                    if (b.wait[i] == k->warp[i].live) count_warp_passed(&k->warp[i]);
        }
        for (u32 i = 0; i < k->n_warps; i++)
            if (b.wait[i]) {
                k->warp[i].runnable |= b.wait[i];
                k->warps_run |= 1u << i;
                b.wait[i] = 0;
            }
        if (k->order != kGreedy) simt_yield(c);
    } else {
        b.wait[c->wid] |= 1u << c->lane;
        c->warp->runnable &= ~(1u << c->lane);
        next_lane(c);
    }
    c->where = nullptr;
}

void simt_check_meeting(Warp* w, u32 mask, const char* what, Loc loc) {
    Fiber* c = simt_current;
    const u32 bit = 1u << c->lane;
    if (!(mask & bit)) simt_fault(loc, "%s: lane %u is not in its own mask %08x", what, c->lane, mask);
    if (mask & ~w->live)
        simt_fault(loc, "%s mismatch: mask %08x names lanes %08x that have returned", what, mask, mask & ~w->live);
    for (u32 l = 0; l < 32; l++) {
        if (l == c->lane || !((w->arrived & mask) >> l & 1)) continue;
        const Fiber& f = w->fib[l];
        if (w->mask[l] != mask)
            simt_fault(loc, "%s mismatch: lane %u waits with mask %08x, lane %u came with %08x", what, l, w->mask[l],
                       c->lane, mask);
        if (strcmp(f.where, what) != 0 || f.loc.line() != loc.line() || f.loc.column() != loc.column())
            simt_fault(loc, "shuffle mismatch: lane %u waits in %s at line %u, lane %u came to %s at line %u", l,
                       f.where, f.loc.line(), c->lane, what, loc.line());
        break;  // those waiting agree with each other
    }
}

void simt_warp_passed(Warp* w) {
    if (w->fib->worker->mode == kCheck)
        check_warp_passed(w);
    else
        count_warp_passed(w);
}

void simt_fault(Loc loc, const char* text, ...) {
    Fiber* c = simt_current;
    Worker* k = c->worker;
    char what[600], all[1000];
    va_list a;
    va_start(a, text);
    vsnprintf(what, sizeof what, text, a);
    va_end(a);
    const std::string at = loc.line() ? std::string(", at ") + file_of(loc) + ":" + std::to_string(loc.line()) : "";
    snprintf(all, sizeof all, "%s: %s%s, block (%u,%u,%u), thread (%u,%u,%u)", k->kernel, what, at.c_str(),
             k->block.x, k->block.y, k->block.z, c->index.x, c->index.y, c->index.z);
    give_up(k, all);
}
