/* driver.cpp - initialisation, the one device, its context; refusals and their texts; settings of our own. */
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>
#include "driver.h"

namespace simt {
namespace {

std::mutex& driver_lock() {
    static std::mutex& m = *new std::mutex;
    return m;
}
char g_text[2048];
const Profile* g_profile = &kProfiles[0];
bool g_initialised = false;
int g_context_users = 0;
__thread Handle t_context = nullptr;
const Handle kContext = (Handle)0x11;

CUresult device_ok(CUdevice d) {
    return d == 0 ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_DEVICE, "there is no device %d, only 0", d);
}

int attribute(int which) {
    const Profile& p = profile();
    switch (which) {
        case 1:
            return kMaxThreads;
        case 2:
        case 3:
            return 1024;
        case 4:
            return 64;
        case 5:
            return 0x7fffffff;
        case 6:
        case 7:
            return 65535;
        case 8:
            return kDefaultSmem;
        case 9:
            return 65536;
        case 10:
            return 32;
        case 12:
        case 82:
            return (int)p.regs_per_block;
        case 13:
            return 2418000;  // kHz, as GB10 reports
        case 16:
            return p.n_sm;
        case 18:
            return p.major == 12 && p.minor == 1;
        case 19:
        case 31:
        case 41:
        case 78:
        case 79:
        case 80:
        case 115:
            return 1;
        case 37:
            return 256;
        case 38:
            return (int)p.l2_bytes;
        case 39:
            return (int)p.threads_per_sm;
        case 75:
            return p.major;
        case 76:
            return p.minor;
        case 81:
            return (int)p.smem_per_sm;
        case 97:
            return (int)p.smem_per_block;
        case 106:
            return 24;
        case 111:
            return 1024;
        default:
            return 0;
    }
}

}  // namespace

CUresult refuse(CUresult code, const char* text, ...) {
    va_list a;
    va_start(a, text);
    vsnprintf(g_text, sizeof g_text, text, a);
    va_end(a);
    return code;
}

Call::Call() : held(driver_lock()) { g_text[0] = 0; }

const Profile& profile() { return *g_profile; }
bool& initialised() { return g_initialised; }
Replay& replay_order() {
    static Replay r = kReplayRecorded;
    return r;
}
CUresult need_context() {
    if (t_context && g_context_users > 0) return CUDA_SUCCESS;
    return refuse(CUDA_ERROR_INVALID_CONTEXT, "no context is current in this thread: cuCtxSetCurrent comes first");
}

}  // namespace simt

using namespace simt;

CU_ENTRY cuInit(unsigned flags) {
    Call call;
    if (flags) return refuse(CUDA_ERROR_INVALID_VALUE, "cuInit takes 0, not %u", flags);
    g_initialised = true;
    return CUDA_SUCCESS;
}
// NVRTC looks for this one in whatever libcuda is loaded, and does without its compile cache when it is refused.
CU_ENTRY cuGetExportTable(const void** table, const void*) {
    *table = nullptr;
    return CUDA_ERROR_NOT_SUPPORTED;
}
CU_ENTRY cuDriverGetVersion(int* version) {
    *version = 13000;
    return CUDA_SUCCESS;
}
CU_ENTRY cuDeviceGetCount(int* n) {
    Call call;
    if (!g_initialised) return refuse(CUDA_ERROR_NOT_INITIALIZED, "cuInit(0) comes first");
    *n = 1;
    return CUDA_SUCCESS;
}
CU_ENTRY cuDeviceGet(CUdevice* d, int ordinal) {
    Call call;
    if (!g_initialised) return refuse(CUDA_ERROR_NOT_INITIALIZED, "cuInit(0) comes first");
    *d = 0;
    return device_ok(ordinal);
}
CU_ENTRY cuDeviceGetName(char* name, int length, CUdevice d) {
    Call call;
    if (length > 0) snprintf(name, (size_t)length, "%s", profile().device_name);
    return device_ok(d);
}
CU_ENTRY cuDeviceGetUuid_v2(char* uuid, CUdevice d) {
    Call call;
    memcpy(uuid, "ds4-cpu-driver-0", 16);
    return device_ok(d);
}
CU_ENTRY cuDeviceGetAttribute(int* value, int which, CUdevice d) {
    Call call;
    *value = attribute(which);
    return device_ok(d);
}
CU_ENTRY cuDeviceTotalMem_v2(size_t* bytes, CUdevice d) {
    Call call;
    *bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    return device_ok(d);
}
CU_ENTRY cuDeviceComputeCapability(int* major, int* minor, CUdevice d) {
    Call call;
    *major = profile().major;
    *minor = profile().minor;
    return device_ok(d);
}
CU_ENTRY cuDevicePrimaryCtxRetain(Handle* context, CUdevice d) {
    Call call;
    if (!g_initialised) return refuse(CUDA_ERROR_NOT_INITIALIZED, "cuInit(0) comes first");
    *context = kContext;
    if (d == 0) g_context_users++;
    return device_ok(d);
}
CU_ENTRY cuDevicePrimaryCtxRelease_v2(CUdevice d) {
    Call call;
    if (g_context_users == 0)
        return refuse(CUDA_ERROR_INVALID_CONTEXT, "the primary context is released more often than retained");
    g_context_users--;
    return device_ok(d);
}
CU_ENTRY cuDevicePrimaryCtxGetState(CUdevice d, unsigned* flags, int* active) {
    Call call;
    *flags = 0;
    *active = g_context_users > 0;
    return device_ok(d);
}
CU_ENTRY cuCtxSetCurrent(Handle context) {
    Call call;
    if (context && (context != kContext || g_context_users == 0))
        return refuse(CUDA_ERROR_INVALID_CONTEXT, "%p is not the retained primary context", context);
    t_context = context;
    return CUDA_SUCCESS;
}
CU_ENTRY cuCtxGetCurrent(Handle* context) {
    *context = t_context;
    return CUDA_SUCCESS;
}
CU_ENTRY cuCtxPushCurrent_v2(Handle context) { return cuCtxSetCurrent(context); }
CU_ENTRY cuCtxPopCurrent_v2(Handle* context) {
    if (context) *context = t_context;
    t_context = nullptr;
    return CUDA_SUCCESS;
}
CU_ENTRY cuCtxGetDevice(CUdevice* d) {
    *d = 0;
    return CUDA_SUCCESS;
}
CU_ENTRY cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}
CU_ENTRY cuCtxSynchronize() {
    Call call;
    if (CUresult r = forbid_in_capture("cuCtxSynchronize")) return r;
    host_waited_for_all();
    return CUDA_SUCCESS;
}

struct ErrorName {
    CUresult code;
    const char *name, *text;
};
static const ErrorName kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_FILE_NOT_FOUND, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND, "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND",
     "shared object symbol not found"},
    {CUDA_ERROR_SHARED_OBJECT_INIT_FAILED, "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED",
     "shared object initialization failed"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "host memory is not registered"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not ended in the same stream as it began"},
    {CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
};
CU_ENTRY cuGetErrorName(CUresult code, const char** name) {
    for (auto& e : kErrors)
        if (e.code == code) return *name = e.name, CUDA_SUCCESS;
    *name = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}
CU_ENTRY cuGetErrorString(CUresult code, const char** text) {
    for (auto& e : kErrors)
        if (e.code == code) return *text = e.text, CUDA_SUCCESS;
    *text = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

SIMT_API const char* ds4simt_last_error_text() { return g_text; }
SIMT_API int ds4simt_abi() { return (int)kAbi; }
SIMT_API int ds4simt_set_workers(int n) {
    Call call;
    const int r = set_workers(n);
    return r ? refuse(r, "%d workers: 1 to 64", n) : r;
}
SIMT_API int ds4simt_set_order(const char* name) {
    Call call;
    const char* names[] = {"greedy", "rising", "falling"};
    for (u32 i = 0; i < 3; i++)
        if (!strcmp(name, names[i])) return set_order((Order)i);
    return refuse(CUDA_ERROR_INVALID_VALUE, "thread order '%s' is not greedy, rising or falling", name);
}
SIMT_API int ds4simt_set_replay(const char* name) {
    Call call;
    const char* names[] = {"recorded", "falling", "turns"};
    for (u32 i = 0; i < 3; i++)
        if (!strcmp(name, names[i])) return replay_order() = (Replay)i, CUDA_SUCCESS;
    return refuse(CUDA_ERROR_INVALID_VALUE, "replay order '%s' is not recorded, falling or turns", name);
}
SIMT_API int ds4simt_set_profile(const char* name) {
    Call call;
    for (auto& p : kProfiles)
        if (!strcmp(name, p.name)) return g_profile = &p, CUDA_SUCCESS;
    return refuse(CUDA_ERROR_INVALID_VALUE, "device profile '%s' is not gb10, h100, b200 or rtx5090", name);
}
