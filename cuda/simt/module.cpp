/* module.cpp - kernel images: a text that names a shared object, the kernels that it exports, their attributes. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include "driver.h"

namespace simt {
namespace {

struct Module {
    std::string path;
    void* library = nullptr;
    std::map<std::string, u32> limits;  // "max_threads.NAME", "regs.NAME"
    std::map<std::string, Handle> functions;
};
Registry<Module>& modules() {
    static auto& r = *new Registry<Module>("module", 3);
    return r;
}
Registry<Function>& functions() {
    static auto& r = *new Registry<Function>("function", 4);
    return r;
}

/// Our own library must be visible to the images that need its symbols, however it was loaded.
void publish_driver() {
    Dl_info info;
    if (dladdr((void*)&simt_barrier, &info) && info.dli_fname)
        dlopen(info.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
}

CUresult open_module(Handle* out, const std::string& path, std::map<std::string, u32> limits) {
    if (CUresult r = need_context()) return r;
    if (CUresult r = forbid_in_capture("loading a module")) return r;
    publish_driver();
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) return refuse(CUDA_ERROR_SHARED_OBJECT_INIT_FAILED, "kernel image %s: %s", path.c_str(), dlerror());
    auto m = std::make_unique<Module>();
    m->path = path, m->library = library, m->limits = std::move(limits);
    *out = modules().add(std::move(m));
    return CUDA_SUCCESS;
}

CUresult load_text(Handle* out, const char* image) {
    const char kMagic[] = "ds4-simt-image 1\n";
    if (!image) return refuse(CUDA_ERROR_INVALID_VALUE, "no image");
    if (strncmp(image, kMagic, sizeof kMagic - 1) != 0)
        return refuse(CUDA_ERROR_INVALID_IMAGE,
                      "a kernel image of this driver begins with 'ds4-simt-image 1'; this one is "
                      "something else (a cubin or PTX for NVIDIA's driver?)");
    std::string path;
    std::map<std::string, u32> limits;
    for (const char* line = image + sizeof kMagic - 1; *line;) {
        const char* end = strchr(line, '\n');
        const std::string s(line, end ? (size_t)(end - line) : strlen(line));
        line += s.size() + (end ? 1 : 0);
        const size_t eq = s.find('=');
        if (s.empty()) continue;
        if (eq == std::string::npos) return refuse(CUDA_ERROR_INVALID_IMAGE, "image line '%s' has no '='", s.c_str());
        const std::string key = s.substr(0, eq), value = s.substr(eq + 1);
        if (key == "path")
            path = value;
        else if (key.rfind("max_threads.", 0) == 0 || key.rfind("regs.", 0) == 0)
            limits[key] = (u32)strtoul(value.c_str(), nullptr, 10);
        else
            return refuse(CUDA_ERROR_INVALID_IMAGE, "image line '%s' is not understood", s.c_str());
    }
    if (path.empty()) return refuse(CUDA_ERROR_INVALID_IMAGE, "the image names no path");
    return open_module(out, path, std::move(limits));
}

}  // namespace

Function* find_function(Handle h) {
    Function* f = functions().find(h);
    if (!f) functions().unknown(h);
    return f;
}

}  // namespace simt

using namespace simt;

/// Which parameters hold weights, a bit each: a kernel with any may be launched ahead.
SIMT_API int ds4simt_set_weights(Handle h, u32 weights) {
    Call call;
    Function* f = find_function(h);
    if (!f) return CUDA_ERROR_INVALID_HANDLE;
    for (u32 i = 0; i < 32; i++)
        if (weights >> i & 1 && (i >= f->record->n_params || f->record->kind[i] != kConstPointer))
            return refuse(CUDA_ERROR_INVALID_VALUE, "%s: parameter %u cannot hold weights: it is no pointer to const",
                          f->name.c_str(), i + 1);
    f->weights = weights;
    return CUDA_SUCCESS;
}

CU_ENTRY cuModuleLoadData(Handle* out, const void* image) {
    Call call;
    return load_text(out, (const char*)image);
}
CU_ENTRY cuModuleLoadDataEx(Handle* out, const void* image, unsigned, void*, void**) {
    return cuModuleLoadData(out, image);
}
CU_ENTRY cuModuleLoad(Handle* out, const char* path) {
    Call call;
    FILE* f = fopen(path, "rb");
    if (!f) return refuse(CUDA_ERROR_FILE_NOT_FOUND, "%s: no such file", path);
    fclose(f);
    return open_module(out, path, {});
}
CU_ENTRY cuModuleUnload(Handle h) {
    Call call;
    Module* m = modules().find(h);
    if (!m) return modules().unknown(h);
    if (CUresult r = forbid_in_capture("unloading a module")) return r;
    for (auto& [name, f] : m->functions) functions().remove(f);
    dlclose(m->library);
    something_went_away();
    modules().remove(h);
    return CUDA_SUCCESS;
}
CU_ENTRY cuModuleGetFunction(Handle* out, Handle module, const char* name) {
    Call call;
    Module* m = modules().find(module);
    if (!m) return modules().unknown(module);
    if (auto it = m->functions.find(name); it != m->functions.end()) return *out = it->second, CUDA_SUCCESS;
    auto* record = (const Export*)dlsym(m->library, (std::string(name) + "__simt").c_str());
    if (!record)
        return refuse(CUDA_ERROR_NOT_FOUND, "%s: no kernel '%s' (EXPORT(%s) missing?)", m->path.c_str(), name, name);
    if (record->abi != kAbi)
        return refuse(CUDA_ERROR_INVALID_IMAGE, "%s was built for block ABI %u, this driver has %u: build it again",
                      m->path.c_str(), record->abi, kAbi);
    auto f = std::make_unique<Function>();
    f->name = name, f->record = record, f->module = module, f->count = &kernel_count(name);
    if (auto it = m->limits.find("max_threads." + f->name); it != m->limits.end()) f->max_threads = it->second;
    if (auto it = m->limits.find("regs." + f->name); it != m->limits.end()) f->regs = it->second;
    *out = functions().add(std::move(f));
    m->functions[name] = *out;
    return CUDA_SUCCESS;
}

CU_ENTRY cuFuncGetAttribute(int* value, int which, Handle h) {
    Call call;
    Function* f = find_function(h);
    if (!f) return CUDA_ERROR_INVALID_HANDLE;
    switch (which) {
        case 0:
            *value = (int)f->max_threads;
            break;
        case 4:
            *value = (int)f->regs;
            break;
        case 5:
        case 6:
            *value = profile().major * 10 + profile().minor;
            break;
        case 8:
            *value = (int)f->max_dynamic_smem;
            break;
        case 1:
        case 2:
        case 3:
        case 7:
            *value = 0;
            break;
        case 9:
            *value = -1;
            break;
        default:
            return refuse(CUDA_ERROR_INVALID_VALUE, "function attribute %d", which);
    }
    return CUDA_SUCCESS;
}
CU_ENTRY cuFuncSetAttribute(Handle h, int which, int value) {
    Call call;
    Function* f = find_function(h);
    if (!f) return CUDA_ERROR_INVALID_HANDLE;
    if (which == 9) return CUDA_SUCCESS;  // carveout: a hint
    if (which != 8) return refuse(CUDA_ERROR_INVALID_VALUE, "function attribute %d cannot be set", which);
    if (value < 0 || (u32)value > profile().smem_per_block)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: %d bytes of dynamic shared memory, profile %s has %u a block",
                      f->name.c_str(), value, profile().name, profile().smem_per_block);
    f->max_dynamic_smem = (u32)value;
    return CUDA_SUCCESS;
}
CU_ENTRY cuFuncSetCacheConfig(Handle h, int) {
    Call call;
    return find_function(h) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CU_ENTRY cuFuncGetName(const char** name, Handle h) {
    Call call;
    Function* f = find_function(h);
    if (!f) return CUDA_ERROR_INVALID_HANDLE;
    *name = f->name.c_str();
    return CUDA_SUCCESS;
}
CU_ENTRY cuFuncGetModule(Handle* module, Handle h) {
    Call call;
    Function* f = find_function(h);
    if (!f) return CUDA_ERROR_INVALID_HANDLE;
    *module = f->module;
    return CUDA_SUCCESS;
}
CU_ENTRY cuFuncGetParamCount(Handle h, size_t* count) {
    Call call;
    Function* f = find_function(h);
    if (!f) return CUDA_ERROR_INVALID_HANDLE;
    *count = f->record->n_params;
    return CUDA_SUCCESS;
}
CU_ENTRY cuFuncGetParamInfo(Handle h, size_t index, size_t* offset, size_t* size) {
    Call call;
    Function* f = find_function(h);
    if (!f) return CUDA_ERROR_INVALID_HANDLE;
    if (index >= f->record->n_params)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s has %u parameters, not %zu", f->name.c_str(), f->record->n_params,
                      index + 1);
    size_t at = 0;
    for (size_t i = 0; i <= index; i++) {
        const size_t s = f->record->size[i], align = s > 8 ? 16 : s;
        at = (at + align - 1) / align * align;
        if (i == index) break;
        at += s;
    }
    if (offset) *offset = at;
    if (size) *size = f->record->size[index];
    return CUDA_SUCCESS;
}
CU_ENTRY cuFuncIsLoaded(int* state, Handle h) {
    Call call;
    *state = 1;
    return find_function(h) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CU_ENTRY cuFuncLoad(Handle h) {
    Call call;
    return find_function(h) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CU_ENTRY cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, Handle h, int threads, size_t smem) {
    Call call;
    Function* f = find_function(h);
    if (!f) return CUDA_ERROR_INVALID_HANDLE;
    const Profile& p = profile();
    if (threads <= 0 || smem > p.smem_per_block) return *n = 0, CUDA_SUCCESS;
    u32 blocks = p.threads_per_sm / (((u32)threads + 31) / 32 * 32);
    blocks = blocks < p.smem_per_sm / ((u32)smem + 1024) ? blocks : p.smem_per_sm / ((u32)smem + 1024);
    if (f->regs) {
        const u32 by_regs = p.regs_per_block / (f->regs * (u32)threads);
        blocks = blocks < by_regs ? blocks : by_regs;
    }
    *n = (int)(blocks < 24 ? blocks : 24);
    return CUDA_SUCCESS;
}
