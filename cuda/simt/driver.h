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
/// Whether memory is poisoned: the check build is in use.
bool poisoned();

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

// ---- order.cpp: who comes before whom, and which bytes each piece of work touched

/// By stream number: how many pieces of that stream's work come before.
typedef std::vector<u64> Clock;
/// A bit a byte of 4,096.
struct Page {
    u64 read[64], write[64];
};
/// What one argument of a launch reached of its allocation; of a copy or fill the range [first, end).
struct Part {
    u32 alloc_id = 0, param = 0;
    bool written = false;
    u64 first = 0, end = 0;
    std::unordered_map<u64, std::unique_ptr<Page>> pages;
    u64 last_index = 0;
    Page* last = nullptr;
};
struct Footprint {
    std::string name;
    bool is_launch = false;
    std::vector<Part> parts;             // of a launch: by parameter
    std::unique_ptr<Footprint> early{};  // of a launch ahead: what it read before its grid_wait()
};
struct Node;
enum Replay : u32 { kReplayRecorded = 0, kReplayFalling = 1, kReplayTurns = 2 };

void join_clock(Clock& into, const Clock& from);
/// 0 is the default stream's; numbers of destroyed streams are given out again.
u32 new_stream_number();
void give_back_stream_number(u32 n);
/// `seen` of a stream moves on to its next piece of work, which comes after all that the host waited for.
void next_work(Clock& seen, u32 number);
/// All later work, in any stream, comes after what this clock knows.
void host_waited(const Clock& seen);
void host_waited_for_all();
void note_range(Footprint& f, u64 address, u64 bytes, bool write);
void note_bytes(Footprint& f, const Span* span, u64 at, u32 n_bytes, bool write);
/// With a copy's or fill's ranges; a launch's bytes are noted while it runs.
std::shared_ptr<Footprint> footprint_of(const Node& n);
CUresult race_with_streams(const Clock& seen, const Footprint& now);
void remember_work(const Clock& seen, u32 number, std::shared_ptr<Footprint> print);
/// For every node those that neither come before it nor after it.
std::vector<std::vector<u32>> unordered_pairs(const std::vector<Node>& nodes);
CUresult race_in_graph(const std::vector<std::shared_ptr<Footprint>>& prints, const std::vector<u32>& beside,
                       const Footprint& now);
/// What a launch ahead read before its wait, against what the launch before it wrote.
CUresult race_ahead(const Footprint* before, const Footprint& now);
/// An order of the nodes that the edges allow: as recorded; always the last that may run; first and last in turn.
std::vector<u32> order_of(const std::vector<Node>& nodes, Replay replay);

// ---- check.cpp

/// Room to note which block touched each of so many bytes; given back with forget_touched.
void* remember_touched(u64 n_bytes);
void forget_touched(void* touched, u64 n_bytes);
/// Of the next launch: where its accesses are noted (null: nowhere); whether it must pass grid_wait(), and the parameters
/// that it may read before, a bit each.
void check_launch(Footprint* print, bool waits, u32 weights);
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
    u32 weights = 0;  // parameters that hold weights, a bit each; with any, the kernel may be launched ahead
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
    bool ahead = false;      // may start before the kernel that precedes it in its stream has ended
    u64 checked_at = ~0ull;  // free_generation() at the last look at the pointers
    std::vector<u8> values;
    std::vector<void*> args;
    std::vector<Span> spans;
};

/// After a copy: the argument pointers point into this launch's own values.
void rebind(Launch& launch);
CUresult make_launch(Launch& out, Handle function, dim3 grid, dim3 block, u32 smem, void** params, void** extra);
/// `print`: where the accesses of a check image are noted, or null.
CUresult run_launch(Launch& launch, Footprint* print);

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
Replay& replay_order();

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
    std::vector<std::vector<u32>> beside;  // unordered_pairs, from the first replay under the check build on
    std::vector<u32> order;                // of the last replay, and what it was made for
    Replay order_for = kReplayRecorded;
};
/// Deep copies: arguments and all.
std::vector<Node> copy_nodes(const std::vector<Node>& nodes);
/// Run the node now, or record it if `stream` captures.
CUresult submit(Handle stream, Node&& node);
/// Run a graph's nodes now, as one piece of the stream's work.
CUresult submit_graph(Handle stream, Graph& graph);
CUresult run_node(Node& node, Footprint* print);
/// Refuses (and invalidates captures) if anything is being captured: allocation, synchronous work, queries.
CUresult forbid_in_capture(const char* what);
CUresult check_stream(Handle stream);
/// The host has waited for the stream's work.
void wait_for_stream(Handle stream);
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
