/* order.cpp - who comes before whom among launches, copies and fills, and races between those that nobody ordered.
 *
 * Work runs when it is submitted, or in a graph one node after the other, so a missing event would never show in the
 * numbers. Hence clocks: a stream knows of every stream how far its work comes before what is submitted next here; an
 * event carries that to whoever waits for it, a synchronisation to the host and so to all later work. In a graph the
 * edges say it. Under the check build each piece of work keeps which bytes it read and wrote, and two pieces without
 * an order that meet in a byte, one of them writing, are a fault. So is a launch ahead that reads before its wait what
 * the launch before it writes: the only one that may still run then, because each waits before it lets the next start.
 */
#include <stdio.h>
#include <deque>
#include <set>
#include "driver.h"

namespace simt {
namespace {

constexpr u64 kPageBytes = 4096;
constexpr size_t kMostWork = 8192;  // direct work remembered since the host last waited

struct Work {
    u32 stream;
    u64 at;
    std::shared_ptr<Footprint> print;
};
std::deque<Work>& work() {
    static auto& d = *new std::deque<Work>;
    return d;
}
std::vector<u64>& submitted() {  // by stream number: pieces of work so far
    static auto& v = *new std::vector<u64>(1, 0);
    return v;
}
std::vector<u32>& free_numbers() {
    static auto& v = *new std::vector<u32>;
    return v;
}
Clock& host() {
    static auto& c = *new Clock;
    return c;
}

bool comes_before(const Work& w, const Clock& seen) { return w.stream < seen.size() && w.at <= seen[w.stream]; }

/// Bits of [first, end) that fall into the page.
void set_range(u64 (&bits)[kPageBytes / 64], u64 page, u64 first, u64 end) {
    const u64 lo = std::max(first, page * kPageBytes), hi = std::min(end, (page + 1) * kPageBytes);
    for (u64 b = lo; b < hi;) {
        const u64 i = b - page * kPageBytes, n = std::min<u64>(64 - i % 64, hi - b);
        bits[i / 64] |= (n == 64 ? ~0ull : (1ull << n) - 1) << i % 64;
        b += n;
    }
}

/// What a part holds in that page, if anything.
bool page_of(const Part& p, u64 index, Page& out) {
    if (p.end > p.first) {
        if ((index + 1) * kPageBytes <= p.first || index * kPageBytes >= p.end) return false;
        out = Page{};
        set_range(p.written ? out.write : out.read, index, p.first, p.end);
        return true;
    }
    auto it = p.pages.find(index);
    if (it == p.pages.end()) return false;
    out = *it->second;
    return true;
}

struct Conflict {
    const Part *a, *b;
    u64 byte;
    bool a_writes, b_writes;
};

bool in_page(const Part& a, const Part& b, u64 index, Conflict& out) {
    Page pa, pb;
    if (!page_of(a, index, pa) || !page_of(b, index, pb)) return false;
    for (u32 i = 0; i < kPageBytes / 64; i++) {
        const u64 hit = (pa.write[i] & (pb.read[i] | pb.write[i])) | (pa.read[i] & pb.write[i]);
        if (!hit) continue;
        const u32 bit = (u32)__builtin_ctzll(hit);
        out = {&a, &b, index * kPageBytes + i * 64 + bit, (pa.write[i] >> bit & 1) != 0,
               (pb.write[i] >> bit & 1) != 0};
        return true;
    }
    return false;
}

bool conflict(const Part& a, const Part& b, Conflict& out) {
    if (a.alloc_id != b.alloc_id || !(a.written || b.written)) return false;
    const bool a_range = a.end > a.first, b_range = b.end > b.first;
    if (a_range && b_range) {
        const u64 lo = std::max(a.first, b.first);
        if (lo >= std::min(a.end, b.end)) return false;
        out = {&a, &b, lo, a.written, b.written};
        return true;
    }
    const Part& walked = a_range || (!b_range && b.pages.size() < a.pages.size()) ? b : a;
    bool found = false;  // the lowest byte, whatever order the pages come in
    for (auto& [index, page] : walked.pages) {
        Conflict c;
        if (in_page(a, b, index, c) && (!found || c.byte < out.byte)) out = c, found = true;
    }
    return found;
}

bool conflict(const Footprint& a, const Footprint& b, Conflict& out) {
    for (auto& pa : a.parts)
        for (auto& pb : b.parts)
            if (conflict(pa, pb, out)) return true;
    return false;
}

std::string side(const Footprint& f, const Part& p, bool writes) {
    char text[300];
    if (f.is_launch)
        snprintf(text, sizeof text, "%s by %s (parameter %u)", writes ? "written" : "read", f.name.c_str(),
                 p.param + 1);
    else
        snprintf(text, sizeof text, "%s by %s", writes ? "written" : "read", f.name.c_str());
    return text;
}

CUresult race(const Footprint& before, const Footprint& now, const Conflict& c) {
    return refuse(CUDA_ERROR_LAUNCH_FAILED,
                  "race between streams: byte %llu of allocation #%u is %s and %s, and no event, edge or stream puts "
                  "one before the other",
                  c.byte, c.a->alloc_id, side(before, *c.a, c.a_writes).c_str(), side(now, *c.b, c.b_writes).c_str());
}

}  // namespace

void join_clock(Clock& into, const Clock& from) {
    if (into.size() < from.size()) into.resize(from.size(), 0);
    for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

u32 new_stream_number() {
    if (free_numbers().empty()) {
        submitted().push_back(0);
        return (u32)submitted().size() - 1;
    }
    const u32 n = free_numbers().back();
    free_numbers().pop_back();
    return n;
}

void give_back_stream_number(u32 n) { free_numbers().push_back(n); }

void next_work(Clock& seen, u32 number) {
    join_clock(seen, host());
    if (seen.size() <= number) seen.resize(number + 1, 0);
    seen[number] = ++submitted()[number];
}

void host_waited(const Clock& seen) {
    join_clock(host(), seen);
    auto& all = work();
    all.erase(std::remove_if(all.begin(), all.end(), [](const Work& w) { return comes_before(w, host()); }),
              all.end());
}

void host_waited_for_all() { host_waited(submitted()); }

void note_range(Footprint& f, u64 address, u64 bytes, bool write) {
    std::string why;
    const Allocation* a = find_allocation(address, bytes, why);
    if (!a) return;
    Part& p = f.parts.emplace_back();
    p.alloc_id = a->id, p.written = write, p.first = address - a->base, p.end = p.first + bytes;
}

void note_bytes(Footprint& f, const Span* span, u64 at, u32 n_bytes, bool write) {
    if (f.parts.size() <= span->param) f.parts.resize(span->param + 1);
    Part& p = f.parts[span->param];
    p.alloc_id = span->alloc_id, p.param = span->param;
    p.written |= write;
    for (u64 end = at + n_bytes; at < end;) {
        const u64 index = at / kPageBytes;
        if (!p.last || p.last_index != index) {
            auto& held = p.pages[index];
            if (!held) held = std::make_unique<Page>();
            p.last = held.get(), p.last_index = index;
        }
        const u64 i = at % kPageBytes, n = std::min<u64>(64 - i % 64, end - at);
        (write ? p.last->write : p.last->read)[i / 64] |= (n == 64 ? ~0ull : (1ull << n) - 1) << i % 64;
        at += n;
    }
}

std::shared_ptr<Footprint> footprint_of(const Node& n) {
    auto f = std::make_shared<Footprint>();
    f->is_launch = n.kind == Node::kLaunch;
    f->name = f->is_launch ? n.launch.function->name : n.kind == Node::kCopy ? "a copy" : "a fill";
    if (n.kind == Node::kCopy && !n.from_host) note_range(*f, n.from, n.bytes, false);
    if (n.kind == Node::kCopy && !n.to_host) note_range(*f, n.to, n.bytes, true);
    if (n.kind == Node::kFill) note_range(*f, n.to, n.bytes, true);
    return f;
}

CUresult race_with_streams(const Clock& seen, const Footprint& now) {
    for (const Work& w : work()) {
        Conflict c;
        if (!comes_before(w, seen) && conflict(*w.print, now, c)) return race(*w.print, now, c);
    }
    return CUDA_SUCCESS;
}

void remember_work(const Clock& seen, u32 number, std::shared_ptr<Footprint> print) {
    auto& all = work();
    all.push_back({number, seen[number], std::move(print)});
    if (all.size() > kMostWork) all.pop_front();
}

std::vector<std::vector<u32>> unordered_pairs(const std::vector<Node>& nodes) {
    const size_t n = nodes.size(), words = (n + 63) / 64;
    std::vector<std::vector<u64>> before(n, std::vector<u64>(words, 0));
    std::vector<std::vector<u32>> out(n);
    for (size_t i = 0; i < n; i++) {
        for (u32 a : nodes[i].after) {
            before[i][a / 64] |= 1ull << a % 64;
            for (size_t w = 0; w < words; w++) before[i][w] |= before[a][w];
        }
        for (u32 j = 0; j < i; j++)
            if (!(before[i][j / 64] >> j % 64 & 1)) out[i].push_back(j), out[j].push_back((u32)i);
    }
    return out;
}

CUresult race_in_graph(const std::vector<std::shared_ptr<Footprint>>& prints, const std::vector<u32>& beside,
                       const Footprint& now) {
    for (u32 other : beside) {
        Conflict c;
        if (prints[other] && conflict(*prints[other], now, c)) return race(*prints[other], now, c);
    }
    return CUDA_SUCCESS;
}

CUresult race_ahead(const Footprint* before, const Footprint& now) {
    Conflict c;
    if (!before || !now.early || !conflict(*before, *now.early, c)) return CUDA_SUCCESS;
    return refuse(
        CUDA_ERROR_LAUNCH_FAILED,
        "%s reads byte %llu of allocation #%u (parameter %u) before its grid_wait(), and the launch before it "
        "writes it: %s (parameter %u)",
        now.name.c_str(), c.byte, c.a->alloc_id, c.b->param + 1, before->name.c_str(), c.a->param + 1);
}

std::vector<u32> order_of(const std::vector<Node>& nodes, Replay replay) {
    std::vector<u32> waits(nodes.size()), order;
    std::vector<std::vector<u32>> then(nodes.size());
    std::set<u32> ready;
    for (u32 i = 0; i < nodes.size(); i++) {
        waits[i] = (u32)nodes[i].after.size();
        if (!waits[i]) ready.insert(i);
        for (u32 a : nodes[i].after) then[a].push_back(i);
    }
    while (!ready.empty()) {
        const bool last = replay == kReplayFalling || (replay == kReplayTurns && order.size() % 2);
        auto it = last ? std::prev(ready.end()) : ready.begin();
        const u32 n = *it;
        ready.erase(it);
        order.push_back(n);
        for (u32 t : then[n])
            if (!--waits[t]) ready.insert(t);
    }
    return order;
}

}  // namespace simt
