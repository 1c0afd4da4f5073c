/* count.cpp - the count build: what each warp instruction asks of memory.
 *
 * Accesses of a warp's lanes are one request if they come from one place in the source and each is its lane's n-th
 * visit there since the warp last met. A request counts its distinct bytes, the 32-byte sectors and 128-byte lines
 * that hold them, and, in shared memory, the wavefronts that its bank conflicts make against those that its bytes
 * need. Sums are kept by kernel, parameter and line; the same run gives the same figures.
 */
#include <stdio.h>
#include "driver.h"

namespace simt {

struct Tally {
    u64 requests = 0, lane_bytes = 0, bytes = 0, sectors = 0, lines = 0, wavefronts = 0, ideal = 0;
    void add(const Tally& t) {
        requests += t.requests, lane_bytes += t.lane_bytes, bytes += t.bytes, sectors += t.sectors, lines += t.lines;
        wavefronts += t.wavefronts, ideal += t.ideal;
    }
};

constexpr u32 kShared = 0xffffffffu;  // in place of a parameter

struct Place {
    std::string file;
    u32 line, param;
    bool store;
    bool operator<(const Place& o) const {
        return std::tie(file, line, param, store) < std::tie(o.file, o.line, o.param, o.store);
    }
};

struct Tallies {
    std::map<Place, Tally> places;
    std::map<std::pair<u32, bool>, u64> touched;  // (parameter, store) -> distinct bytes, summed over launches
};

KernelCount::KernelCount() = default;
KernelCount::~KernelCount() = default;

namespace {

struct Request {
    u64 address[32];
    u32 lanes = 0, n_bytes = 0;
};
/// One place in the source as one warp goes through it.
struct Visits {
    Loc loc;
    u32 param = 0;
    bool store = false;
    u32 n[32] = {};
    std::vector<Request> requests;
};
struct Key {
    const void* place;
    u32 param_store;
    bool operator==(const Key& o) const { return place == o.place && param_store == o.param_store; }
};
struct KeyHash {
    size_t operator()(const Key& k) const { return (size_t)k.place * 31 + k.param_store; }
};
struct Book {
    Tallies* tallies = nullptr;
    std::unordered_map<Key, Visits, KeyHash> open[32];         // by warp
    std::map<std::pair<u32, bool>, std::vector<u64>> touched;  // bits, one a byte of the allocation
};

std::map<std::string, KernelCount>& kernels() {
    static auto& m = *new std::map<std::string, KernelCount>;
    return m;
}

Book& book(Worker* k) {
    if (!k->tally) k->tally = new Book;
    return *(Book*)k->tally;
}

/// Number of distinct values of address >> shift over all requested bytes; shift 0 counts bytes.
u64 distinct(const std::vector<std::pair<u64, u64>>& ranges, u32 shift) {  // sorted by start
    u64 n = 0, next = 0;
    for (auto [a, end] : ranges) {
        const u64 first = std::max(a >> shift, next), last = (end - 1) >> shift;
        if (last + 1 > first) {
            n += last + 1 - first;
            next = last + 1;
        }
    }
    return n;
}

void wavefronts(const Request& r, Tally& t) {
    // A wavefront serves each of 32 four-byte banks once; wide accesses go by parts of 128 bytes' worth of lanes.
    const u32 width = std::max(4u, r.n_bytes), at_once = std::min(32u, 128 / width);
    for (u32 lane = 0; lane < 32; lane += at_once) {
        std::vector<u64> words;
        for (u32 l = lane; l < lane + at_once; l++)
            if (r.lanes >> l & 1)
                for (u64 w = r.address[l] >> 2; w <= (r.address[l] + r.n_bytes - 1) >> 2; w++) words.push_back(w);
        std::sort(words.begin(), words.end());
        words.erase(std::unique(words.begin(), words.end()), words.end());
        u32 bank[32] = {}, most = 0;
        for (u64 w : words) most = std::max(most, ++bank[w & 31]);
        t.wavefronts += most;
        t.ideal += (words.size() + 31) / 32;
    }
}

Tally weigh(const Request& r, bool shared) {
    Tally t;
    std::vector<std::pair<u64, u64>> ranges;
    for (u32 l = 0; l < 32; l++)
        if (r.lanes >> l & 1) ranges.push_back({r.address[l], r.address[l] + r.n_bytes});
    std::sort(ranges.begin(), ranges.end());
    t.requests = 1;
    t.lane_bytes = ranges.size() * r.n_bytes;
    t.bytes = distinct(ranges, 0);
    if (shared) {
        wavefronts(r, t);
    } else {
        t.sectors = distinct(ranges, 5);
        t.lines = distinct(ranges, 7);
    }
    return t;
}

const char* file_of(Loc loc) {
    const char* slash = strrchr(loc.file_name(), '/');
    return slash ? slash + 1 : loc.file_name();
}

void close_requests(Book& b, u32 wid) {
    for (auto& [key, v] : b.open[wid]) {
        if (v.requests.empty()) continue;
        Tally& t = b.tallies->places[{file_of(v.loc), v.loc.line(), v.param, v.store}];
        for (auto& r : v.requests) t.add(weigh(r, v.param == kShared));
        v.requests.clear();
        memset(v.n, 0, sizeof v.n);
    }
}

void count(u64 address, u32 n_bytes, bool store, u32 param, Loc loc) {
    Fiber* c = simt_current;
    Book& b = book(c->worker);
    const void* place;
    memcpy(&place, &loc, sizeof place);
    Visits& v = b.open[c->wid][{place, param << 1 | store}];
    v.loc = loc, v.param = param, v.store = store;
    const u32 nth = v.n[c->lane]++;
    if (nth >= v.requests.size()) v.requests.resize(nth + 1);
    Request& r = v.requests[nth];
    r.address[c->lane] = address;
    r.lanes |= 1u << c->lane;
    r.n_bytes = std::max(r.n_bytes, n_bytes);
}

void print(std::string& out, const char* name, const Tally& t) {
    char s[400];
    snprintf(s, sizeof s,
             "\"%s\":{\"requests\":%llu,\"bytes\":%llu,\"lane_bytes\":%llu,\"sectors\":%llu,\"sector_bytes\":%llu,"
             "\"lines\":%llu,\"line_bytes\":%llu",
             name, t.requests, t.bytes, t.lane_bytes, t.sectors, t.sectors * 32, t.lines, t.lines * 128);
    out += s;
}

void print_shared(std::string& out, const char* name, const Tally& t) {
    char s[300];
    snprintf(
        s, sizeof s,
        "\"%s\":{\"requests\":%llu,\"bytes\":%llu,\"lane_bytes\":%llu,\"wavefronts\":%llu,\"ideal_wavefronts\":%llu}",
        name, t.requests, t.bytes, t.lane_bytes, t.wavefronts, t.ideal);
    out += s;
}

void print_kernel(std::string& out, const Tallies& all) {
    std::map<std::pair<u32, bool>, Tally> sums;
    for (auto& [place, t] : all.places) sums[{place.param, place.store}].add(t);
    out += ",\"args\":{";
    bool first = true;
    for (u32 param = 0; param < kMaxParams; param++) {
        if (!sums.count({param, false}) && !sums.count({param, true})) continue;
        out += (first ? "\"" : ",\"") + std::to_string(param) + "\":{";
        first = false;
        for (bool store : {false, true}) {
            print(out, store ? "store" : "load", sums[{param, store}]);
            auto it = all.touched.find({param, store});
            out += ",\"touched_bytes\":" + std::to_string(it == all.touched.end() ? 0 : it->second) + "}";
            if (!store) out += ",";
        }
        out += "}";
    }
    out += "},\"shared\":{";
    print_shared(out, "load", sums[{kShared, false}]);
    out += ",";
    print_shared(out, "store", sums[{kShared, true}]);
    out += "},\"lines\":[";
    first = true;
    for (auto& [place, t] : all.places) {
        out +=
            std::string(first ? "" : ",") + "{\"file\":\"" + place.file + "\",\"line\":" + std::to_string(place.line);
        first = false;
        if (place.param == kShared) {
            out += ",\"space\":\"shared\",";
            print_shared(out, place.store ? "store" : "load", t);
            out += "}";
        } else {
            out += ",\"space\":\"global\",\"arg\":" + std::to_string(place.param) + ",";
            print(out, place.store ? "store" : "load", t);
            out += "}}";
        }
    }
    out += "]";
}

}  // namespace

KernelCount& kernel_count(const std::string& kernel) { return kernels()[kernel]; }

void count_launch_begin(Worker* k, KernelCount& count, u32) {
    if (!count.seen) count.seen = std::make_unique<Tallies>();
    Book& b = book(k);
    b.tallies = count.seen.get();
    b.touched.clear();
    for (auto& o : b.open) o.clear();
}

void count_launch_end(Worker* k) {
    Book& b = book(k);
    for (auto& [key, bits] : b.touched) {
        u64 n = 0;
        for (u64 w : bits) n += (u64)__builtin_popcountll(w);
        b.tallies->touched[key] += n;
    }
    b.touched.clear();
}

void count_block_end(Worker* k) {
    for (u32 w = 0; w < k->n_warps; w++) close_requests(book(k), w);
}

void count_warp_passed(Warp* w) { close_requests(book(w->fib->worker), w->fib->wid); }

void count_global(const void* p, u32 n_bytes, bool store, const Span* span, Loc loc) {
    count((u64)p, n_bytes, store, span->param, loc);
    auto& bits = book(simt_current->worker).touched[{span->param, store}];
    if (bits.empty()) bits.resize((size_t)(span->hi - span->lo) / 64 + 1);
    const u64 at = (u64)((const u8*)p - span->lo);
    for (u64 i = at; i < at + n_bytes; i++) bits[i / 64] |= 1ull << i % 64;
}

void count_shared(u64 offset, u32 n_bytes, bool store, Loc loc) { count(offset, n_bytes, store, kShared, loc); }

}  // namespace simt

using namespace simt;

SIMT_API const char* ds4simt_counters_json() {
    static std::string& out = *new std::string;
    Call call;
    u64 launches = 0;
    for (auto& [name, c] : kernels()) launches += c.launches;
    out = "{\"launches\":" + std::to_string(launches) + ",\"kernels\":{";
    bool first = true;
    for (auto& [name, c] : kernels()) {
        if (!c.launches) continue;
        out += (first ? "\"" : ",\"") + name + "\":{\"launches\":" + std::to_string(c.launches);
        first = false;
        if (c.seen) print_kernel(out, *c.seen);
        out += "}";
    }
    out += "}}";
    return out.c_str();
}

SIMT_API int ds4simt_reset_counters() {
    Call call;
    for (auto& [name, c] : kernels()) {
        c.launches = 0;
        c.seen.reset();
    }
    return CUDA_SUCCESS;
}
