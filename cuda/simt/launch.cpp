/* launch.cpp - a launch, checked against the device profile, the kernel's signature and live memory, then run. */
#include <stdio.h>
#include <time.h>
#include "driver.h"

namespace simt {
namespace {

constexpr double kWakeFrom = 25e3;  // ns of work that waking another worker pays for

double now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

std::string shape(dim3 d) {
    char s[60];
    snprintf(s, sizeof s, "(%u,%u,%u)", d.x, d.y, d.z);
    return s;
}

CUresult check_limits(const Function& f, dim3 grid, dim3 block, u32 smem) {
    const char* name = f.name.c_str();
    const Profile& p = profile();
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: grid %s, block %s: every axis is at least 1", name,
                      shape(grid).c_str(), shape(block).c_str());
    if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: grid %s is over (2147483647,65535,65535)", name,
                      shape(grid).c_str());
    const u64 threads = (u64)block.x * block.y * block.z;
    if (block.x > 1024 || block.y > 1024 || block.z > 64 || threads > kMaxThreads)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: a block of %s = %llu threads, profile %s allows 1024", name,
                      shape(block).c_str(), threads, p.name);
    if (threads > f.max_threads)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: a block of %llu threads, its launch bounds say %u", name,
                      threads, f.max_threads);
    if (smem > p.smem_per_block)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: %u bytes of shared memory a block, profile %s has %u", name,
                      smem, p.name, p.smem_per_block);
    if (smem > f.max_dynamic_smem)
        return refuse(CUDA_ERROR_INVALID_VALUE,
                      "%s: %u bytes of shared memory, allowed %u: raise "
                      "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES first",
                      name, smem, f.max_dynamic_smem);
    const u64 regs =
        (u64)((f.regs + 7) / 8 * 8) * ((threads + 31) / 32 * 32);  // allocated by warps, 8 a thread at a time
    if (regs > p.regs_per_block)
        return refuse(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
                      "%s: %llu registers a block (%u a thread), profile %s has %u", name, regs, f.regs, p.name,
                      p.regs_per_block);
    return CUDA_SUCCESS;
}

/// Every pointer lies in live memory; spans say how far each may reach.
CUresult check_pointers(Launch& l) {
    const Function& f = *l.function;
    for (u32 i = 0; i < f.record->n_params; i++) {
        if (f.record->kind[i] == kScalar) continue;
        u64 address;
        memcpy(&address, l.args[i], 8);
        l.spans[i] = {nullptr, nullptr, 0, i, nullptr};
        if (address == 0) continue;
        std::string why;
        const Allocation* a = find_allocation(address, 1, why);
        if (!a)
            return refuse(CUDA_ERROR_ILLEGAL_ADDRESS, "%s: parameter %u (of %u) points to %#llx: %s", f.name.c_str(),
                          i + 1, f.record->n_params, address, why.c_str());
        l.spans[i] = {(const u8*)a->base, (const u8*)a->base + a->bytes, a->id, i, a->touched};
        if (f.record->mode == kCheck && f.record->kind[i] == kPointer && !a->touched)
            a->touched = remember_touched(a->bytes);
    }
    for (u32 i = 0; i < f.record->n_params; i++) {  // blocks can only disturb each other where one of them may write
        bool written = false;
        for (u32 j = 0; j < f.record->n_params; j++)
            written |= f.record->kind[j] == kPointer && l.spans[j].lo == l.spans[i].lo;
        std::string why;
        if (f.record->kind[i] != kScalar && l.spans[i].lo)
            l.spans[i].touched = written ? find_allocation((u64)l.spans[i].lo, 1, why)->touched : nullptr;
    }
    l.checked_at = free_generation();
    return CUDA_SUCCESS;
}

}  // namespace

void rebind(Launch& l) {
    u8* base = l.values.data();
    for (u32 i = 0; i < l.function->record->n_params; i++) {
        l.args[i] = base;
        base += (l.function->record->size[i] + 15) / 16 * 16;
    }
}

CUresult make_launch(Launch& l, Handle function, dim3 grid, dim3 block, u32 smem, void** params, void** extra) {
    Function* f = find_function(function);
    if (!f) return CUDA_ERROR_INVALID_HANDLE;
    if (extra)
        return refuse(CUDA_ERROR_NOT_SUPPORTED, "%s: parameters through 'extra' are not taken, use kernelParams",
                      f->name.c_str());
    if (CUresult r = check_limits(*f, grid, block, smem)) return r;
    const u32 n = f->record->n_params;
    if (n && !params)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s takes %u parameters, none were given", f->name.c_str(), n);
    l.function = f, l.function_handle = function, l.grid = grid, l.block = block, l.smem = smem;
    l.values.resize(16 * (n + 1));
    l.args.resize(n + 1);
    l.spans.resize(n + 1);
    for (u32 i = 0, at = 0; i < n; i++) {
        if (!params[i])
            return refuse(CUDA_ERROR_INVALID_VALUE, "%s takes %u parameters, number %u is missing", f->name.c_str(),
                          n, i + 1);
        if (at + f->record->size[i] + 16 > l.values.size()) l.values.resize(at + f->record->size[i] + 16 * (n + 1));
        memcpy(&l.values[at], params[i], f->record->size[i]);
        at += (f->record->size[i] + 15) / 16 * 16;
    }
    rebind(l);
    return check_pointers(l);
}

CUresult run_launch(Launch& l, Footprint* print) {
    if (l.checked_at != free_generation()) {  // a replay: kernels and memory may be gone
        if (!find_function(l.function_handle)) return CUDA_ERROR_INVALID_HANDLE;
        if (CUresult r = check_pointers(l)) return r;
    }
    Function& f = *l.function;
    f.count->launches++;
    std::string fault;
    const double n_blocks = (double)l.grid.x * l.grid.y * l.grid.z;
    const Job job{f.record->entry,
                  l.grid,
                  l.block,
                  l.smem,
                  f.record->mode,
                  l.args.data(),
                  l.spans.data(),
                  f.name.c_str(),
                  f.count,
                  f.record->n_params,
                  f.ns_per_block * n_blocks < kWakeFrom};
    const double began = now_ns();
    check_launch(print, l.ahead || f.weights, f.weights);
    const bool ran = run_job(job, fault);
    const double took = (now_ns() - began) * n_workers_for(job) / n_blocks;
    f.ns_per_block = took < f.ns_per_block ? took : f.ns_per_block + (took - f.ns_per_block) / 8;  // spikes fade
    if (ran) return CUDA_SUCCESS;
    return refuse(CUDA_ERROR_LAUNCH_FAILED, "%s", fault.c_str());
}

}  // namespace simt

using namespace simt;

static CUresult launch(Handle f, dim3 grid, dim3 block, u32 smem, Handle stream, void** params, void** extra,
                       bool ahead = false) {
    if (CUresult r = need_context()) return r;
    if (CUresult r = check_stream(stream)) return r;
    Node n;
    n.kind = Node::kLaunch;
    if (CUresult r = make_launch(n.launch, f, grid, block, smem, params, extra)) return r;
    n.launch.ahead = ahead;
    return submit(stream, std::move(n));
}

CU_ENTRY cuLaunchKernel(Handle f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned smem, Handle stream, void** params, void** extra) {
    Call call;
    return launch(f, {gx, gy, gz}, {bx, by, bz}, smem, stream, params, extra);
}
CU_ENTRY cuLaunchKernelEx(const CUlaunchConfig* c, Handle f, void** params, void** extra) {
    Call call;
    bool ahead = false;
    for (unsigned i = 0; i < c->numAttrs; i++) {
        const int id = c->attrs[i].id;
        if (id != kAttributeIgnore && id != kAttributeProgrammaticStreamSerialization && id != kAttributePriority)
            return refuse(CUDA_ERROR_NOT_SUPPORTED, "launch attribute %d is not one that this driver knows", id);
        if (id == kAttributeProgrammaticStreamSerialization) {
            int allowed;
            memcpy(&allowed, c->attrs[i].value, sizeof allowed);
            ahead = allowed != 0;
        }
    }
    return launch(f, {c->gridDimX, c->gridDimY, c->gridDimZ}, {c->blockDimX, c->blockDimY, c->blockDimZ},
                  c->sharedMemBytes, c->hStream, params, extra, ahead);
}
