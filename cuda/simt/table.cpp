/* table.cpp - cuGetProcAddress: every name that cuda-python asks for has an answer, ours or "not supported". */
#include "driver.h"

// Prototypes do not matter for a table of addresses; the assembler's names do.
#define ENTRY(asked, symbol) extern "C" int symbol##_address() asm(#symbol);
#include "entries.h"
#undef ENTRY

extern "C" __attribute__((visibility("default"))) CUresult cuGetProcAddress_v2(const char*, void**, int,
                                                                               unsigned long long, int*);

namespace simt {
namespace {

CUresult not_supported() {
    Call call;
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "the CPU driver does not have this entry point");
}

}  // namespace

void* entry_point(const char* name, int version) {
    static const auto& table = *new std::unordered_map<std::string, void*>{
#define ENTRY(asked, symbol) {#asked, (void*)&symbol##_address},
#include "entries.h"
#undef ENTRY
    };
    // One name, two signatures: the newer came with 12.3.
    if (!strcmp(name, "cuStreamGetCaptureInfo") && version >= 12030) name = "cuStreamGetCaptureInfo_v3";
    if (!strcmp(name, "cuGetProcAddress") || !strcmp(name, "cuGetProcAddress_v2")) return (void*)&cuGetProcAddress_v2;
    auto it = table.find(name);
    return it == table.end() ? nullptr : it->second;
}

}  // namespace simt

CUresult cuGetProcAddress_v2(const char* name, void** address, int version, unsigned long long, int* status) {
    *address = simt::entry_point(name, version);
    if (!*address) *address = (void*)&simt::not_supported;
    if (status) *status = 0;
    return CUDA_SUCCESS;
}
