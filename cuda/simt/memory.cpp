/* memory.cpp - device memory (ours is the host's), copies and fills, page-locked host memory.
 *
 * Every address is looked up: a copy must lie in one live allocation, and a refusal says which allocation was meant
 * and how far the address is off. Freed allocations are remembered until their addresses are given out again.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <deque>
#include <set>
#include "driver.h"

namespace simt {
namespace {

constexpr u64 kMapFrom = 1 << 20, kSlack = 256, kAskFrom = 64 << 20, kHoldBack = 64 << 20;

std::map<u64, Allocation>& live() {
    static auto& m = *new std::map<u64, Allocation>;
    return m;
}
std::map<u64, Allocation>& freed() {
    static auto& m = *new std::map<u64, Allocation>;
    return m;
}
std::map<u64, u64>& host() {  // base -> bytes, registered or allocated here
    static auto& m = *new std::map<u64, u64>;
    return m;
}
std::set<u64>& host_owned() {
    static auto& s = *new std::set<u64>;
    return s;
}
// With poisoned memory (check builds) freed blocks are held back for a while: an address that is used after its free
// must not have a new owner at once.
std::deque<Allocation>& held_back() {
    static auto& d = *new std::deque<Allocation>;
    return d;
}
u64 g_held_bytes = 0;
u32 g_next_id = 1;
u64 g_free_generation = 0;
bool g_poison = false;

u64 available_bytes() {
    u64 kb = 0;
    if (FILE* f = fopen("/proc/meminfo", "r")) {
        char line[200];
        while (fgets(line, sizeof line, f))
            if (sscanf(line, "MemAvailable: %llu kB", &kb) == 1) break;
        fclose(f);
    }
    return kb << 10;
}

CUresult allocate(CUdeviceptr* out, u64 bytes) {
    if (CUresult r = need_context()) return r;
    if (CUresult r = forbid_in_capture("an allocation")) return r;
    if (bytes == 0) return refuse(CUDA_ERROR_INVALID_VALUE, "an allocation of 0 bytes");
    if (bytes >= kAskFrom && bytes > available_bytes())
        return refuse(CUDA_ERROR_OUT_OF_MEMORY, "%llu bytes asked for, %llu available", bytes, available_bytes());
    const bool mapped = bytes >= kMapFrom;
    void* p = nullptr;
    if (mapped) {
        p = mmap(nullptr, bytes + kSlack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED)
            p = nullptr;
        else
            madvise(p, bytes + kSlack, MADV_HUGEPAGE);
    } else if (posix_memalign(&p, 256, bytes + kSlack) != 0) {
        p = nullptr;
    }
    if (!p) return refuse(CUDA_ERROR_OUT_OF_MEMORY, "%llu bytes: the system has no such room", bytes);
    if (g_poison) memset(p, 0xff, bytes);
    const u64 base = (u64)p;
    auto& dead = freed();  // whoever was there before is forgotten now
    for (auto it = dead.lower_bound(base); it != dead.end() && it->first < base + bytes;) it = dead.erase(it);
    if (auto it = dead.lower_bound(base); it != dead.begin() && (--it)->first + it->second.bytes > base)
        dead.erase(it);
    live()[base] = {base, bytes, g_next_id++, mapped};
    *out = base;
    return CUDA_SUCCESS;
}

void give_back(const Allocation& a) {
    if (a.mapped)
        munmap((void*)a.base, a.bytes + kSlack);
    else
        free((void*)a.base);
}

CUresult release(CUdeviceptr p) {
    if (CUresult r = need_context()) return r;
    if (p == 0) return CUDA_SUCCESS;
    auto it = live().find(p);
    if (it == live().end()) {
        auto d = freed().find(p);
        if (d != freed().end())
            return refuse(CUDA_ERROR_INVALID_VALUE, "allocation #%u at %#llx was freed before", d->second.id, p);
        return refuse(CUDA_ERROR_INVALID_VALUE, "%#llx is not the start of an allocation", p);
    }
    if (it->second.touched) forget_touched(it->second.touched, it->second.bytes);
    it->second.touched = nullptr;
    freed()[p] = it->second;
    if (g_poison) {
        memset((void*)p, 0xff, it->second.bytes);
        held_back().push_back(it->second);
        g_held_bytes += it->second.bytes;
    } else {
        give_back(it->second);
    }
    while (g_held_bytes > kHoldBack || (!g_poison && g_held_bytes)) {
        g_held_bytes -= held_back().front().bytes;
        give_back(held_back().front());
        held_back().pop_front();
    }
    live().erase(it);
    something_went_away();
    return CUDA_SUCCESS;
}

CUresult need(const char* what, u64 address, u64 bytes) {
    std::string why;
    if (find_allocation(address, bytes, why)) return CUDA_SUCCESS;
    return refuse(CUDA_ERROR_INVALID_VALUE, "%s of %llu bytes at %#llx: %s", what, bytes, address, why.c_str());
}

CUresult copy(Handle stream, bool synchronous, u64 to, bool to_host, u64 from, bool from_host, u64 bytes) {
    if (CUresult r = need_context()) return r;
    if (synchronous)
        if (CUresult r = forbid_in_capture("a synchronous copy")) return r;
    if (bytes == 0) return check_stream(stream);
    if (!to_host)
        if (CUresult r = need("copy to device memory", to, bytes)) return r;
    if (!from_host)
        if (CUresult r = need("copy from device memory", from, bytes)) return r;
    if ((to_host && to == 0) || (from_host && from == 0))
        return refuse(CUDA_ERROR_INVALID_VALUE, "a copy to or from host address 0");
    Node n;
    n.kind = Node::kCopy, n.to = to, n.from = from, n.bytes = bytes, n.to_host = to_host, n.from_host = from_host;
    const CUresult r = submit(stream, std::move(n));
    if (synchronous) wait_for_stream(stream);
    return r;
}

CUresult fill(Handle stream, bool synchronous, u64 to, u32 value, u32 width, u64 count) {
    if (CUresult r = need_context()) return r;
    if (synchronous)
        if (CUresult r = forbid_in_capture("a synchronous fill")) return r;
    if (count == 0) return check_stream(stream);
    if (to % width)
        return refuse(CUDA_ERROR_INVALID_VALUE, "a fill of %u-byte values at %#llx is not aligned", width, to);
    if (CUresult r = need("fill", to, count * width)) return r;
    Node n;
    n.kind = Node::kFill, n.to = to, n.bytes = count * width, n.value = value, n.width = width;
    const CUresult r = submit(stream, std::move(n));
    if (synchronous) wait_for_stream(stream);
    return r;
}

bool on_device(u64 p) {
    std::string why;
    return find_allocation(p, 1, why) != nullptr;
}

}  // namespace

u64 free_generation() { return g_free_generation; }
void something_went_away() { g_free_generation++; }
bool poisoned() { return g_poison; }

const Allocation* find_allocation(u64 address, u64 bytes, std::string& why) {
    char text[200];
    auto it = live().upper_bound(address);
    if (it != live().begin()) {
        const Allocation& a = (--it)->second;
        if (address - a.base <= a.bytes && bytes <= a.bytes - (address - a.base)) return &a;
        if (address - a.base < a.bytes) {
            snprintf(text, sizeof text, "it ends %llu bytes past allocation #%u of %llu bytes",
                     address - a.base + bytes - a.bytes, a.id, a.bytes);
            return why = text, nullptr;
        }
    }
    auto d = freed().upper_bound(address);
    if (d != freed().begin() && address - (--d)->first < d->second.bytes)
        snprintf(text, sizeof text, "it lies in allocation #%u of %llu bytes, which was freed", d->second.id,
                 d->second.bytes);
    else
        snprintf(text, sizeof text, "it is not device memory");
    return why = text, nullptr;
}

CUresult run_node(Node& n, Footprint* print) {
    if (n.kind == Node::kLaunch) return run_launch(n.launch, print);
    if (n.kind == Node::kCopy) {  // in a replay the memory may be gone
        if (!n.to_host)
            if (CUresult r = need("copy to device memory", n.to, n.bytes)) return r;
        if (!n.from_host)
            if (CUresult r = need("copy from device memory", n.from, n.bytes)) return r;
        memmove((void*)n.to, (const void*)n.from, n.bytes);
    }
    if (n.kind == Node::kFill) {
        if (CUresult r = need("fill", n.to, n.bytes)) return r;
        if (n.width == 1)
            memset((void*)n.to, (int)n.value, n.bytes);
        else if (n.width == 2)
            std::fill_n((u16*)n.to, n.bytes / 2, (u16)n.value);
        else
            std::fill_n((u32*)n.to, n.bytes / 4, n.value);
    }
    return CUDA_SUCCESS;
}

}  // namespace simt

using namespace simt;

SIMT_API int ds4simt_set_poison(int on) {
    Call call;
    g_poison = on != 0;
    return CUDA_SUCCESS;
}

CU_ENTRY cuMemAlloc_v2(CUdeviceptr* p, size_t bytes) {
    Call call;
    return allocate(p, bytes);
}
CU_ENTRY cuMemAllocAsync(CUdeviceptr* p, size_t bytes, Handle stream) {
    Call call;
    if (CUresult r = check_stream(stream)) return r;
    return allocate(p, bytes);
}
CU_ENTRY cuMemAllocManaged(CUdeviceptr* p, size_t bytes, unsigned) {
    Call call;
    return allocate(p, bytes);
}
CU_ENTRY cuMemFree_v2(CUdeviceptr p) {
    Call call;
    if (CUresult r = forbid_in_capture("cuMemFree")) return r;
    return release(p);
}
CU_ENTRY cuMemFreeAsync(CUdeviceptr p, Handle stream) {
    Call call;
    if (CUresult r = check_stream(stream)) return r;
    if (CUresult r = forbid_in_capture("cuMemFreeAsync")) return r;
    return release(p);
}
CU_ENTRY cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
    Call call;
    if (total) *total = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    if (free_bytes) *free_bytes = available_bytes();
    return CUDA_SUCCESS;
}
CU_ENTRY cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr p) {
    Call call;
    std::string why;
    const Allocation* a = find_allocation(p, 1, why);
    if (!a) return refuse(CUDA_ERROR_NOT_FOUND, "%#llx: %s", p, why.c_str());
    if (base) *base = a->base;
    if (bytes) *bytes = a->bytes;
    return CUDA_SUCCESS;
}
CU_ENTRY cuPointerGetAttribute(void* out, int which, CUdeviceptr p) {
    Call call;
    std::string why;
    if (!find_allocation(p, 1, why)) return refuse(CUDA_ERROR_INVALID_VALUE, "%#llx: %s", p, why.c_str());
    if (which == 2) return *(unsigned*)out = 2, CUDA_SUCCESS;  // memory type: device
    if (which == 3) return *(CUdeviceptr*)out = p, CUDA_SUCCESS;
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "pointer attribute %d", which);
}

CU_ENTRY cuMemAllocHost_v2(void** p, size_t bytes) {
    Call call;
    if (CUresult r = forbid_in_capture("an allocation")) return r;
    if (bytes == 0 || posix_memalign(p, 4096, bytes) != 0)
        return refuse(CUDA_ERROR_OUT_OF_MEMORY, "%zu bytes of host memory", bytes);
    host()[(u64)*p] = bytes;
    host_owned().insert((u64)*p);
    return CUDA_SUCCESS;
}
CU_ENTRY cuMemHostAlloc(void** p, size_t bytes, unsigned) { return cuMemAllocHost_v2(p, bytes); }
CU_ENTRY cuMemFreeHost(void* p) {
    Call call;
    if (!host_owned().erase((u64)p))
        return refuse(CUDA_ERROR_INVALID_VALUE, "%p is not host memory allocated here", p);
    host().erase((u64)p);
    free(p);
    return CUDA_SUCCESS;
}
CU_ENTRY cuMemHostRegister_v2(void* p, size_t bytes, unsigned) {
    Call call;
    if (!p || !bytes) return refuse(CUDA_ERROR_INVALID_VALUE, "nothing to register");
    host()[(u64)p] = bytes;
    return CUDA_SUCCESS;
}
CU_ENTRY cuMemHostUnregister(void* p) {
    Call call;
    if (host_owned().count((u64)p) || !host().erase((u64)p))
        return refuse(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "%p was not registered", p);
    return CUDA_SUCCESS;
}

CU_ENTRY cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    Call call;
    return copy(nullptr, true, to, false, (u64)from, true, bytes);
}
CU_ENTRY cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    Call call;
    return copy(nullptr, true, (u64)to, true, from, false, bytes);
}
CU_ENTRY cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    Call call;
    return copy(nullptr, true, to, false, from, false, bytes);
}
CU_ENTRY cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    Call call;
    return copy(nullptr, true, to, !on_device(to), from, !on_device(from), bytes);
}
CU_ENTRY cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, Handle stream) {
    Call call;
    return copy(stream, false, to, false, (u64)from, true, bytes);
}
CU_ENTRY cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, Handle stream) {
    Call call;
    return copy(stream, false, (u64)to, true, from, false, bytes);
}
CU_ENTRY cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, Handle stream) {
    Call call;
    return copy(stream, false, to, false, from, false, bytes);
}
CU_ENTRY cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, Handle stream) {
    Call call;
    return copy(stream, false, to, !on_device(to), from, !on_device(from), bytes);
}
CU_ENTRY cuMemsetD8_v2(CUdeviceptr to, unsigned char v, size_t n) {
    Call call;
    return fill(nullptr, true, to, v, 1, n);
}
CU_ENTRY cuMemsetD16_v2(CUdeviceptr to, unsigned short v, size_t n) {
    Call call;
    return fill(nullptr, true, to, v, 2, n);
}
CU_ENTRY cuMemsetD32_v2(CUdeviceptr to, unsigned v, size_t n) {
    Call call;
    return fill(nullptr, true, to, v, 4, n);
}
CU_ENTRY cuMemsetD8Async(CUdeviceptr to, unsigned char v, size_t n, Handle stream) {
    Call call;
    return fill(stream, false, to, v, 1, n);
}
CU_ENTRY cuMemsetD16Async(CUdeviceptr to, unsigned short v, size_t n, Handle stream) {
    Call call;
    return fill(stream, false, to, v, 2, n);
}
CU_ENTRY cuMemsetD32Async(CUdeviceptr to, unsigned v, size_t n, Handle stream) {
    Call call;
    return fill(stream, false, to, v, 4, n);
}
