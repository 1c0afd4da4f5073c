/* driver.h - what the driver's files share: objects behind handles, refusals with a text, one lock.
 *
 * Handles are numbers that are never used twice, so a destroyed object is told from one that never was. Execution is
 * synchronous: when a launch returns, its blocks have run.
 */
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>
#include "abi.h"
#include "block.h"
#include "profile.h"

#define CU_ENTRY extern "C" __attribute__((visibility("default"))) CUresult

#pragma GCC visibility push(hidden)
namespace simt {

/// Keep `text` as the explanation of the refusal and give its code back.
__attribute__((format(printf, 2, 3))) CUresult refuse(CUresult code, const char* text, ...);

/// Held during every entry point: the lock, and an empty error text to begin with.
struct Call {
    Call();
    std::lock_guard<std::mutex> held;
};

const Profile& profile();
bool& initialised();
/// Refuses where no context is current in the calling thread: each thread has its own, as in the real driver.
CUresult need_context();

// ---- memory.cpp

struct Allocation {
    u64 base, bytes;
    u32 id;
    bool mapped;
    mutable void* touched = nullptr;  // see check.cpp
};

/// The live allocation that [address, address + bytes) lies in; null, with a text in `why`, if there is none.
const Allocation* find_allocation(u64 address, u64 bytes, std::string& why);
/// Rises whenever memory is freed or a module unloaded: what was valid before may not be now.
u64 free_generation();
void something_went_away();

// ---- count.cpp

struct Tallies;
struct KernelCount {
    u64 launches = 0;
    std::unique_ptr<Tallies> seen;  // count images only
    KernelCount();
    ~KernelCount();
};
KernelCount& kernel_count(const std::string& kernel);
void count_launch_begin(Worker* k, KernelCount& count, u32 n_params);
void count_launch_end(Worker* k);
void count_block_end(Worker* k);
void count_warp_passed(Warp* w);
void count_global(const void* p, u32 n_bytes, bool store, const Span* span, Loc loc);
void count_shared(u64 offset, u32 n_bytes, bool store, Loc loc);

// ---- check.cpp

/// Room to note which block touched each of so many bytes; given back with forget_touched.
void* remember_touched(u64 n_bytes);
void forget_touched(void* touched, u64 n_bytes);
void check_prepare(Worker* k);
void check_block_begin(Worker* k);
void check_barrier(Worker* k, const Barrier& b);
void check_warp_passed(Warp* w);
void check_thread_exit(Fiber* c);
void check_reset(Worker* k);

// ---- module.cpp

struct Function {
    std::string name;
    const Export* record = nullptr;
    KernelCount* count = nullptr;
    u32 max_threads = kMaxThreads, regs = 0, max_dynamic_smem = kDefaultSmem;
    double ns_per_block = 1e9;  // what its blocks took lately
    Handle module = nullptr;
};
Function* find_function(Handle h);

// ---- launch.cpp, block.cpp

/// A launch with its arguments copied: what a graph keeps, and what the workers run.
struct Launch {
    Function* function = nullptr;
    Handle function_handle = nullptr;
    dim3 grid{}, block{};
    u32 smem = 0;
    u64 checked_at = ~0ull;  // free_generation() at the last look at the pointers
    std::vector<u8> values;
    std::vector<void*> args;
    std::vector<Span> spans;
};

/// After a copy: the argument pointers point into this launch's own values.
void rebind(Launch& launch);
CUresult make_launch(Launch& out, Handle function, dim3 grid, dim3 block, u32 smem, void** params, void** extra);
CUresult run_launch(Launch& launch);

struct Job {
    Entry entry;
    dim3 grid, block;
    u32 smem, mode;
    void** args;
    const Span* spans;
    const char* kernel;
    KernelCount* count;
    u32 n_params;
    bool alone;  // too little work to wake other workers
};
/// How many workers a job of that many blocks would get.
u32 n_workers_for(const Job& job);
/// Run all blocks; true, or false with the fault's text.
bool run_job(const Job& job, std::string& fault);
int set_workers(int n);
int set_order(Order order);

// ---- stream.cpp

struct Node {
    enum Kind { kLaunch, kCopy, kFill, kEmpty } kind = kEmpty;
    Launch launch;
    u64 to = 0, from = 0, bytes = 0;
    bool to_host = false, from_host = false;
    u32 value = 0, width = 1;
    std::vector<u32> after;  // indices of nodes that come first
};
struct Graph {
    std::vector<Node> nodes;
};
/// Deep copies: arguments and all.
std::vector<Node> copy_nodes(const std::vector<Node>& nodes);
/// Run the node now, or record it if `stream` captures.
CUresult submit(Handle stream, Node&& node);
CUresult run_node(Node& node);
/// Refuses (and invalidates captures) if anything is being captured: allocation, synchronous work, queries.
CUresult forbid_in_capture(const char* what);
CUresult check_stream(Handle stream);
bool stream_is_default(Handle stream);
bool is_capturing(Handle stream);
Handle adopt_graph(std::unique_ptr<Graph> graph);

// ---- table.cpp

/// The entry point asked for under a name and version; null if we do not have it.
void* entry_point(const char* name, int version);

/// Objects of one kind by handle.
template <class T>
struct Registry {
    const char* kind;
    u64 tag, next = 1;
    std::unordered_map<u64, std::unique_ptr<T>> live;

    Registry(const char* kind_, u64 tag_) : kind(kind_), tag(tag_) {}
    Handle add(std::unique_ptr<T> object) {
        const u64 h = tag << 48 | next++ << 4;
        live[h] = std::move(object);
        return (Handle)h;
    }
    T* find(Handle h) const {
        auto it = live.find((u64)h);
        return it == live.end() ? nullptr : it->second.get();
    }
    CUresult unknown(Handle h) const {
        const u64 v = (u64)h;
        const bool was = v >> 48 == tag && (v & 15) == 0 && (v >> 4 & 0xfffffffffffull) < next && v != tag << 48;
        return refuse(CUDA_ERROR_INVALID_HANDLE, "%p is %s", h,
                      was ? (std::string("a destroyed ") + kind).c_str()
                          : (std::string("no ") + kind + " of this driver").c_str());
    }
    bool remove(Handle h) { return live.erase((u64)h) != 0; }
};

}  // namespace simt
#pragma GCC visibility pop
