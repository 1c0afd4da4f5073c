/* check.cpp - the check build: bounds of global and shared memory, races between barriers, cp.async before its wait,
 * global memory before grid_wait().
 *
 * Order between two accesses of shared memory is judged by clocks. Each warp has one; it moves at every barrier and
 * sync_warp, and at a barrier the warps that met learn each other's. A shuffle or a vote orders nothing, as in CUDA.
 * Blocks of one launch have no order at all: a byte of global memory that one of them writes is no other's to read or
 * write, except that atomics may meet.
 *
 * A byte remembers who wrote it last and its last readers: the last of all, the last of another warp, the last other
 * lane of the same warp, which is enough to see a missing barrier in either direction.
 */
#include <sys/mman.h>
#include <new>
#include "driver.h"
#include "watched.h"

namespace simt {
namespace {

struct Access {
    u32 clock;
    u16 tid, line;  // tid 0xffff: nobody
};
struct Byte {
    Access write, read[3];
    u16 pending;  // 1 + the thread whose cp.async will fill it
    bool atomic;
};
struct Pending {
    u8* to;
    const u8* from;
    Loc loc;
};
struct Async {
    std::vector<Pending> copies;
    std::vector<u32> group_ends;
};
struct Shadow {
    u32 base;          // clocks below are of earlier blocks
    u32 seen[32][32];  // seen[w][v]: how far warp w knows warp v; seen[w][w]: w's own clock
    Async async[kMaxThreads];
    bool waited[kMaxThreads];  // passed grid_wait() in this block
    Byte byte[kMaxSmem];       // poisoned and zeroed by the system: clock 0 is before everything
};

Shadow* shadow(Worker* k) { return (Shadow*)k->shadow; }

bool ordered(const Worker* k, const Access& a, const Fiber* c) {
    if (a.tid == c->tid) return true;
    const u32* seen = ((const Shadow*)k->shadow)->seen[c->wid];
    const u32 wid = a.tid >> 5;
    return wid == c->wid ? a.clock < seen[wid] : a.clock <= seen[wid];
}

[[noreturn]] void race(const Access& other, const char* before, const char* now, u64 offset, Loc loc) {
    simt_fault(loc,
               "shared-memory race: byte %llu is %s here and was %s by thread %u at line %u, with no barrier between",
               offset, now, before, other.tid, other.line);
}

void note_store(Worker* k, Fiber* c, u64 offset, u32 n_bytes, bool atomic, Loc loc) {
    Shadow* s = shadow(k);
    const Access me{s->seen[c->wid][c->wid], (u16)c->tid, (u16)loc.line()};
    for (u32 i = 0; i < n_bytes; i++) {
        Byte& b = s->byte[offset + i];
        if (b.pending)
            simt_fault(loc, "shared memory byte %llu is written while thread %u's cp.async into it is in flight",
                       offset + i, b.pending - 1u);
        if (!(atomic && b.atomic) && !ordered(k, b.write, c)) race(b.write, "written", "written", offset + i, loc);
        for (auto& r : b.read)
            if (!ordered(k, r, c)) race(r, "read", "overwritten", offset + i, loc);
        b.write = me;
        b.atomic = atomic;
        b.read[0] = b.read[1] = b.read[2] = Access{0, me.tid, 0};
    }
}

void note_load(Worker* k, Fiber* c, u64 offset, u32 n_bytes, Loc loc) {
    Shadow* s = shadow(k);
    const Access me{s->seen[c->wid][c->wid], (u16)c->tid, (u16)loc.line()};
    for (u32 i = 0; i < n_bytes; i++) {
        Byte& b = s->byte[offset + i];
        if (b.pending)
            simt_fault(loc, "shared memory byte %llu is read before thread %u waited for the cp.async that fills it",
                       offset + i, b.pending - 1u);
        if (!ordered(k, b.write, c)) race(b.write, "written", "read", offset + i, loc);
        if (b.read[0].tid != me.tid) b.read[b.read[0].tid >> 5 == c->wid ? 2 : 1] = b.read[0];
        b.read[0] = me;
    }
}

/// A byte of global memory in the launch that is going on: 1 + the block that wrote it, that read it.
struct Touch {
    u32 launch, writer, reader;
};
constexpr u32 kAtomic = 0x80000000u, kSeveral = 0xffffffffu;

struct {  // of the launch that is going on; check images run on one worker
    Footprint* print;
    bool waits;
    u32 weights;
} g_launch;

bool is_weight(const Span* span) { return g_launch.weights >> span->param & 1; }

/// An access before grid_wait(), which a kernel that is launched ahead may make to weights only.
void before_wait(Worker* k, u64 at, u32 n_bytes, bool store, const Span* span, Loc loc) {
    if (!g_launch.waits || shadow(k)->waited[simt_current->tid]) return;
    if (store)
        simt_fault(loc, "byte %llu of allocation #%u (parameter %u) is written before grid_wait()", at,
                   span->alloc_id, span->param + 1);
    if (!is_weight(span))
        simt_fault(loc,
                   "byte %llu of allocation #%u (parameter %u) is read before grid_wait(), and the launch table does "
                   "not name it among the weights",
                   at, span->alloc_id, span->param + 1);
    if (!g_launch.print) return;
    auto& early = g_launch.print->early;
    if (!early) early = std::make_unique<Footprint>();
    note_bytes(*early, span, at, n_bytes, false);
}

void note_global(Worker* k, const void* p, u32 n_bytes, bool store, bool atomic, const Span* span, Loc loc) {
    const u64 offset = (u64)((const u8*)p - span->lo);
    before_wait(k, offset, n_bytes, store, span, loc);
    if (g_launch.print) note_bytes(*g_launch.print, span, offset, n_bytes, store);
    if (!span->touched || (u64)k->grid.x * k->grid.y * k->grid.z == 1) return;
    const u32 me = 1 + k->block.x + k->grid.x * (k->block.y + k->grid.y * k->block.z);
    const u64 at = (u64)((const u8*)p - span->lo);
    for (u32 i = 0; i < n_bytes; i++) {
        Touch& t = ((Touch*)span->touched)[at + i];
        if (t.launch != k->launch) t = {k->launch, 0, 0};
        const u32 writer = t.writer & ~kAtomic;
        const char* before = writer && writer != me && !(atomic && (t.writer & kAtomic)) ? "written"
                             : store && t.reader && t.reader != me                       ? "read"
                                                                                         : nullptr;
        if (SIMT_UNLIKELY(before != nullptr))
            simt_fault(loc,
                       "race between blocks: byte %llu of allocation #%u (parameter %u) is %s here and was %s by "
                       "another block of this launch",
                       at + i, span->alloc_id, span->param + 1, store ? "written" : "read", before);
        if (store)
            t.writer = me | (atomic ? kAtomic : 0);
        else
            t.reader = t.reader && t.reader != me ? kSeveral : me;
    }
}

u64 shared_offset(Worker* k, const void* p, u32 n_bytes, u32 align, const char* what, Loc loc) {
    const i64 offset = (const u8*)p - k->smem;
    if (offset < 0 || offset + n_bytes > k->smem_bytes)
        simt_fault(loc, "shared memory %s of %u bytes at offset %lld, the launch gave the block %u bytes", what,
                   n_bytes, offset, k->smem_bytes);
    if (offset % align)
        simt_fault(loc, "misaligned %s of %u bytes at shared memory offset %lld", what, n_bytes, offset);
    return (u64)offset;
}

void check_global(const void* address, u32 n_bytes, u32 align, const char* what, const Span* span, Loc loc) {
    const u8* p = (const u8*)address;
    if (SIMT_UNLIKELY(p < span->lo || p + n_bytes > span->hi)) {
        if (!span->lo)
            simt_fault(loc, "out of bounds: global %s through parameter %u, which is null", what, span->param + 1);
        const u64 size = (u64)(span->hi - span->lo);
        if (p < span->lo)
            simt_fault(
                loc,
                "out of bounds: global %s of %u bytes %lld bytes before allocation #%u of %llu bytes (parameter %u)",
                what, n_bytes, (i64)(span->lo - p), span->alloc_id, size, span->param + 1);
        simt_fault(loc,
                   "out of bounds: global %s of %u bytes at byte %llu of allocation #%u of %llu bytes (parameter %u)",
                   what, n_bytes, (u64)(p - span->lo), span->alloc_id, size, span->param + 1);
    }
    if (SIMT_UNLIKELY((u64)p % align))
        simt_fault(loc, "misaligned global %s of %u bytes (parameter %u)", what, n_bytes, span->param + 1);
}

}  // namespace

void* remember_touched(u64 n_bytes) {
    void* m = mmap(nullptr, n_bytes * sizeof(Touch), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return m == MAP_FAILED ? nullptr : m;
}

void forget_touched(void* touched, u64 n_bytes) { munmap(touched, n_bytes * sizeof(Touch)); }

void check_launch(Footprint* print, bool waits, u32 weights) { g_launch = {print, waits, weights}; }

void check_prepare(Worker* k) {
    static u32 n_launches = 0;
    k->launch = ++n_launches;
    if (!k->shadow) {
        void* m =
            mmap(nullptr, sizeof(Shadow), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (m == MAP_FAILED) {
            k->shadow = nullptr;
            return;
        }
        k->shadow = m;
        Shadow* s = shadow(k);
        for (auto& a : s->async) new (&a) Async;
        s->base = 1;
    }
}

void check_block_begin(Worker* k) {
    Shadow* s = shadow(k);
    u32 top = s->base;
    for (u32 w = 0; w < 32; w++) top = std::max(top, s->seen[w][w]);
    if (top > 0xf0000000u) {  // clocks would wrap: forget everything instead
        memset((void*)s->byte, 0, sizeof s->byte);
        top = 0;
    }
    s->base = top + 1;
    for (u32 w = 0; w < 32; w++)
        for (u32 v = 0; v < 32; v++) s->seen[w][v] = w == v ? s->base : s->base - 1;
    memset(k->smem, 0xff, k->smem_bytes);
    memset(s->waited, 0, sizeof s->waited);
}

void check_barrier(Worker* k, const Barrier& b) {
    Shadow* s = shadow(k);
    u32 most[32] = {};
    for (u32 w = 0; w < k->n_warps; w++)
        if (b.wait[w])
            for (u32 v = 0; v < 32; v++) most[v] = std::max(most[v], s->seen[w][v]);
    for (u32 w = 0; w < k->n_warps; w++)
        if (b.wait[w]) {
            memcpy(s->seen[w], most, sizeof most);
            s->seen[w][w]++;
        }
}

void check_warp_passed(Warp* w) {
    const Fiber* c = simt_current;
    if (strcmp(c->where, "sync_warp") == 0) shadow(c->worker)->seen[c->wid][c->wid]++;
    (void)w;
}

void check_thread_exit(Fiber* c) {
    Async& a = shadow(c->worker)->async[c->tid];
    if (!a.copies.empty()) simt_fault(a.copies[0].loc, "a thread returns without waiting for its cp.async");
    if (g_launch.waits && !shadow(c->worker)->waited[c->tid])
        simt_fault(Loc(), "a thread returns without its grid_wait(), in a kernel that may be launched ahead");
    a.group_ends.clear();
}

void check_reset(Worker* k) {
    Shadow* s = shadow(k);
    for (auto& a : s->async) {
        a.copies.clear();
        a.group_ends.clear();
    }
    memset((void*)s->byte, 0, sizeof s->byte);
}

}  // namespace simt

using namespace simt;

void simt_global_access(const void* p, u32 n_bytes, u32 align, bool store, const Span* span, Loc loc) {
    check_global(p, n_bytes, align, store ? "write" : "read", span, loc);
    Worker* k = simt_current->worker;
    if (k->mode == kCount)
        count_global(p, n_bytes, store, span, loc);
    else
        note_global(k, p, n_bytes, store, false, span, loc);
}

void simt_global_atomic(const void* p, u32 n_bytes, const Span* span, Loc loc) {
    check_global(p, n_bytes, n_bytes, "atomic", span, loc);
    Worker* k = simt_current->worker;
    if (k->mode == kCount)
        count_global(p, n_bytes, true, span, loc);
    else
        note_global(k, p, n_bytes, true, true, span, loc);
}

void simt_shared_access(const void* p, u32 n_bytes, u32 align, bool store, Loc loc) {
    Fiber* c = simt_current;
    Worker* k = c->worker;
    const u64 offset = shared_offset(k, p, n_bytes, align, store ? "write" : "read", loc);
    if (k->mode == kCount) return count_shared(offset, n_bytes, store, loc);
    if (store)
        note_store(k, c, offset, n_bytes, false, loc);
    else
        note_load(k, c, offset, n_bytes, loc);
}

void simt_shared_atomic(const void* p, u32 n_bytes, Loc loc) {
    Fiber* c = simt_current;
    Worker* k = c->worker;
    const u64 offset = shared_offset(k, p, n_bytes, n_bytes, "atomic", loc);
    if (k->mode == kCount) return count_shared(offset, n_bytes, true, loc);
    note_store(k, c, offset, n_bytes, true, loc);
}

void simt_async_copy(void* to, const void* from, const Span* span, Loc loc) {
    Fiber* c = simt_current;
    Worker* k = c->worker;
    check_global(from, 16, 16, "cp.async read", span, loc);
    const u64 offset = shared_offset(k, to, 16, 16, "cp.async write", loc);
    if (k->mode == kCount) {
        count_global(from, 16, false, span, loc);
        count_shared(offset, 16, true, loc);
        memcpy(to, from, 16);
        return;
    }
    note_global(k, from, 16, false, false, span, loc);
    note_store(k, c, offset, 16, false, loc);
    for (u32 i = 0; i < 16; i++) shadow(k)->byte[offset + i].pending = (u16)(c->tid + 1);
    memset(to, 0xff, 16);
    shadow(k)->async[c->tid].copies.push_back({(u8*)to, (const u8*)from, loc});
}

void simt_async_commit(Loc) {
    Fiber* c = simt_current;
    if (c->worker->mode == kCount) return;
    Async& a = shadow(c->worker)->async[c->tid];
    a.group_ends.push_back((u32)a.copies.size());
}

void simt_async_wait(u32 n_open, Loc loc) {
    Fiber* c = simt_current;
    Worker* k = c->worker;
    if (k->mode == kCount) return;
    Shadow* s = shadow(k);
    Async& a = s->async[c->tid];
    if (a.group_ends.size() <= n_open) return;
    const size_t groups = a.group_ends.size() - n_open, n = a.group_ends[groups - 1];
    for (size_t i = 0; i < n; i++) {
        const Pending& p = a.copies[i];
        const u64 offset = (u64)(p.to - k->smem);
        for (u32 b = 0; b < 16; b++) s->byte[offset + b].pending = 0;
        note_store(k, c, offset, 16, false, loc);
        memcpy(p.to, p.from, 16);
    }
    a.copies.erase(a.copies.begin(), a.copies.begin() + (i64)n);
    a.group_ends.erase(a.group_ends.begin(), a.group_ends.begin() + (i64)groups);
    for (auto& e : a.group_ends) e -= (u32)n;
}

void simt_read_only(const Span* span, Loc loc) {
    if (simt_current->worker->mode == kCheck && g_launch.waits && !is_weight(span))
        simt_fault(loc,
                   "gld_nc of parameter %u, which the launch table does not name among the weights: in a kernel that "
                   "may be launched ahead another one may write it meanwhile",
                   span->param + 1);
}

void simt_prefetch(const void* p, u32 n_bytes, const Span* span, Loc loc) {
    check_global(p, n_bytes, n_bytes, "prefetch", span, loc);
    Worker* k = simt_current->worker;
    if (k->mode == kCheck) before_wait(k, (u64)((const u8*)p - span->lo), n_bytes, false, span, loc);
}

void simt_grid_wait(Loc) {
    const Fiber* c = simt_current;
    if (c->worker->mode == kCheck) shadow(c->worker)->waited[c->tid] = true;
}

void simt_grid_release(Loc loc) {
    const Fiber* c = simt_current;
    if (c->worker->mode == kCheck && g_launch.waits && !shadow(c->worker)->waited[c->tid])
        simt_fault(loc, "grid_release() before grid_wait(): the next launch could overtake the one before this");
}
