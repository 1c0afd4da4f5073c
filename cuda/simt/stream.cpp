/* stream.cpp - streams, events, capture. Work runs when it is submitted, which is a legal order of any streams.
 *
 * A capture belongs to the stream that began it; streams join by waiting for an event recorded in it and must be
 * joined back before it ends. While anything is captured, allocation and synchronous work are refused and spoil it.
 */
#include <time.h>
#include <algorithm>
#include "driver.h"

namespace simt {
namespace {

struct Capture {
    Graph graph;
    Handle origin = nullptr;
    u64 id = 0;
    bool invalid = false, over = false;
    std::string spoiled_by;
};
struct Stream {
    unsigned flags = 0;
    int priority = 0;
    std::shared_ptr<Capture> capture;
    std::vector<u32> tips;  // nodes that the next one comes after
    u32 number = 0;
    Clock seen;                         // what comes before its next work, its own work too
    std::shared_ptr<Footprint> last{};  // of its last work, if that was a launch and nothing was waited for since
};
struct Event {
    unsigned flags = 0;
    bool recorded = false;
    double ms = 0;
    std::shared_ptr<Capture> capture;
    std::vector<u32> tips;
    Clock seen;
};

Registry<Stream>& streams() {
    static auto& r = *new Registry<Stream>("stream", 5);
    return r;
}
Registry<Event>& events() {
    static auto& r = *new Registry<Event>("event", 6);
    return r;
}
std::vector<std::shared_ptr<Capture>>& captures() {
    static auto& v = *new std::vector<std::shared_ptr<Capture>>;
    return v;
}
Stream g_default;
u64 g_next_capture = 1;
__thread int t_capture_mode = 0;

bool is_default(Handle h) { return (u64)h <= 2; }  // null, legacy, per-thread
Stream* find(Handle h) { return is_default(h) ? &g_default : streams().find(h); }

double now_ms() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

void spoil(Capture& c, const std::string& by) {
    if (!c.invalid) c.spoiled_by = by;
    c.invalid = true;
}

void unite(std::vector<u32>& tips, const std::vector<u32>& more) {
    for (u32 n : more)
        if (std::find(tips.begin(), tips.end(), n) == tips.end()) tips.push_back(n);
}

/// Does every tip of every joined stream come before the origin's tips?
bool all_joined(const std::shared_ptr<Capture>& c, const Stream& origin) {
    std::vector<bool> before(c->graph.nodes.size(), false);
    std::vector<u32> todo = origin.tips;
    while (!todo.empty()) {
        const u32 n = todo.back();
        todo.pop_back();
        if (before[n]) continue;
        before[n] = true;
        for (u32 a : c->graph.nodes[n].after) todo.push_back(a);
    }
    for (auto& [h, s] : streams().live)
        if (s->capture == c)
            for (u32 n : s->tips)
                if (!before[n]) return false;
    return true;
}

void leave(const std::shared_ptr<Capture>& c) {
    c->over = true;
    for (auto& [h, s] : streams().live)
        if (s->capture == c) {
            s->capture.reset();
            s->tips.clear();
        }
    auto& all = captures();
    all.erase(std::remove(all.begin(), all.end(), c), all.end());
}

CUresult create_stream(Handle* out, unsigned flags, int priority) {
    if (CUresult r = need_context()) return r;
    if (flags > 1) return refuse(CUDA_ERROR_INVALID_VALUE, "stream flags %u", flags);
    auto s = std::make_unique<Stream>();
    s->flags = flags, s->priority = std::clamp(priority, -5, 0), s->number = new_stream_number();
    *out = streams().add(std::move(s));
    return CUDA_SUCCESS;
}

/// The stream's clock at its next piece of work. The default stream and blocking ones wait for each other.
Clock& advance(Stream& s) {
    if (&s == &g_default) {
        for (auto& [h, other] : streams().live)
            if (!(other->flags & 1)) join_clock(s.seen, other->seen);
    } else if (!(s.flags & 1)) {
        join_clock(s.seen, g_default.seen);
    }
    next_work(s.seen, s.number);
    return s.seen;
}

/// Run one node and keep what it touched; `now` is the clock of the work it belongs to, `before` the launch that it may
/// start ahead of.
CUresult run_noted(Node& node, const Clock& now, const Footprint* before, std::shared_ptr<Footprint>& print) {
    print = footprint_of(node);
    if (CUresult r = run_node(node, print.get())) return r;
    if (node.kind == Node::kLaunch && node.launch.ahead)
        if (CUresult r = race_ahead(before, *print)) return r;
    return race_with_streams(now, *print);
}

CUresult refuse_on_captured(Stream& s, const char* what) {
    if (!s.capture) return CUDA_SUCCESS;
    spoil(*s.capture, what);
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%s on a stream that is being captured", what);
}

CUresult refuse_captured_event(const Event& e, const char* what) {
    if (!e.capture) return CUDA_SUCCESS;
    if (!e.capture->over) spoil(*e.capture, what);
    return refuse(CUDA_ERROR_CAPTURED_EVENT, "%s on an event that was last recorded in a capture", what);
}

}  // namespace

CUresult forbid_in_capture(const char* what) {
    if (captures().empty()) return CUDA_SUCCESS;
    for (auto& c : captures()) spoil(*c, what);
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%s while a stream is being captured", what);
}

bool stream_is_default(Handle h) { return is_default(h); }
bool is_capturing(Handle h) {
    Stream* s = find(h);
    return s && s->capture;
}
CUresult check_stream(Handle h) { return find(h) ? CUDA_SUCCESS : streams().unknown(h); }
void wait_for_stream(Handle h) {
    if (Stream* s = find(h)) host_waited(s->seen);
}

CUresult submit(Handle h, Node&& node) {
    Stream* s = find(h);
    if (!s) return streams().unknown(h);
    if (!s->capture) {
        if (is_default(h) && !captures().empty()) {
            for (auto& c : captures()) spoil(*c, "work on the default stream");
            return refuse(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "work on the default stream while another is captured");
        }
        const Clock& now = advance(*s);
        if (!poisoned()) return s->last.reset(), run_node(node, nullptr);
        std::shared_ptr<Footprint> print;
        const std::shared_ptr<Footprint> before = std::move(s->last);
        if (CUresult r = run_noted(node, now, before.get(), print)) return r;
        if (print->is_launch) s->last = print;
        remember_work(now, s->number, std::move(print));
        return CUDA_SUCCESS;
    }
    Capture& c = *s->capture;
    if (c.invalid)
        return refuse(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "this capture was spoiled by %s", c.spoiled_by.c_str());
    node.after = s->tips;
    s->tips.assign(1, (u32)c.graph.nodes.size());
    c.graph.nodes.push_back(std::move(node));
    return CUDA_SUCCESS;
}

CUresult submit_graph(Handle h, Graph& g) {
    Stream& s = *find(h);
    const Clock& now = advance(s);
    s.last.reset();
    if (g.order.size() != g.nodes.size() || g.order_for != replay_order())
        g.order = order_of(g.nodes, replay_order()), g.order_for = replay_order();
    if (!poisoned()) {
        for (u32 i : g.order)
            if (CUresult r = run_node(g.nodes[i], nullptr)) return r;
        return CUDA_SUCCESS;
    }
    if (g.beside.empty()) g.beside = unordered_pairs(g.nodes);
    std::vector<std::shared_ptr<Footprint>> prints(g.nodes.size());
    for (u32 i : g.order) {
        std::shared_ptr<Footprint> print;
        const auto& after = g.nodes[i].after;
        const Footprint* before = after.size() == 1 && prints[after[0]]->is_launch ? prints[after[0]].get() : nullptr;
        if (CUresult r = run_noted(g.nodes[i], now, before, print)) return r;
        if (CUresult r = race_in_graph(prints, g.beside[i], *print)) return r;
        prints[i] = std::move(print);
    }
    for (auto& print : prints) remember_work(now, s.number, std::move(print));
    return CUDA_SUCCESS;
}

}  // namespace simt

using namespace simt;

CU_ENTRY cuStreamCreate(Handle* out, unsigned flags) {
    Call call;
    return create_stream(out, flags, 0);
}
CU_ENTRY cuStreamCreateWithPriority(Handle* out, unsigned flags, int priority) {
    Call call;
    return create_stream(out, flags, priority);
}
CU_ENTRY cuStreamDestroy_v2(Handle h) {
    Call call;
    Stream* s = is_default(h) ? nullptr : streams().find(h);
    if (!s) return streams().unknown(h);
    if (CUresult r = refuse_on_captured(*s, "cuStreamDestroy")) return r;
    give_back_stream_number(s->number);
    streams().remove(h);
    return CUDA_SUCCESS;
}
CU_ENTRY cuStreamSynchronize(Handle h) {
    Call call;
    Stream* s = find(h);
    if (!s) return streams().unknown(h);
    if (is_default(h))
        if (CUresult r = forbid_in_capture("synchronising the default stream")) return r;
    if (CUresult r = refuse_on_captured(*s, "cuStreamSynchronize")) return r;
    host_waited(s->seen);
    return CUDA_SUCCESS;
}
CU_ENTRY cuStreamQuery(Handle h) {
    Call call;
    Stream* s = find(h);
    if (!s) return streams().unknown(h);
    if (is_default(h))
        if (CUresult r = forbid_in_capture("querying the default stream")) return r;
    if (CUresult r = refuse_on_captured(*s, "cuStreamQuery")) return r;
    host_waited(s->seen);
    return CUDA_SUCCESS;
}
CU_ENTRY cuStreamGetPriority(Handle h, int* priority) {
    Call call;
    Stream* s = find(h);
    if (!s) return streams().unknown(h);
    *priority = s->priority;
    return CUDA_SUCCESS;
}
CU_ENTRY cuStreamGetFlags(Handle h, unsigned* flags) {
    Call call;
    Stream* s = find(h);
    if (!s) return streams().unknown(h);
    *flags = s->flags;
    return CUDA_SUCCESS;
}
CU_ENTRY cuStreamWaitEvent(Handle h, Handle event, unsigned) {
    Call call;
    Stream* s = find(h);
    if (!s) return streams().unknown(h);
    Event* e = events().find(event);
    if (!e) return events().unknown(event);
    if (!e->capture) {
        s->last.reset();
        if (!s->capture || !e->recorded) return join_clock(s->seen, e->seen), CUDA_SUCCESS;
        spoil(*s->capture, "a wait for work outside of it");
        return refuse(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "a captured stream waits for an event recorded outside");
    }
    if (e->capture->over)
        return refuse(CUDA_ERROR_CAPTURED_EVENT, "the event was last recorded in a capture that has ended");
    if (s->capture && s->capture != e->capture) {
        spoil(*s->capture, "a merge with another capture");
        spoil(*e->capture, "a merge with another capture");
        return refuse(CUDA_ERROR_STREAM_CAPTURE_MERGE, "the event belongs to another capture");
    }
    if (is_default(h)) {
        spoil(*e->capture, "a wait by the default stream");
        return refuse(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "the default stream cannot join a capture");
    }
    if (!s->capture) {
        s->capture = e->capture;
        s->tips.clear();
    }
    unite(s->tips, e->tips);
    return CUDA_SUCCESS;
}

CU_ENTRY cuEventCreate(Handle* out, unsigned flags) {
    Call call;
    if (CUresult r = need_context()) return r;
    auto e = std::make_unique<Event>();
    e->flags = flags;
    *out = events().add(std::move(e));
    return CUDA_SUCCESS;
}
CU_ENTRY cuEventDestroy_v2(Handle h) {
    Call call;
    return events().remove(h) ? CUDA_SUCCESS : events().unknown(h);
}
CU_ENTRY cuEventRecord(Handle h, Handle stream) {
    Call call;
    Event* e = events().find(h);
    if (!e) return events().unknown(h);
    Stream* s = find(stream);
    if (!s) return streams().unknown(stream);
    e->capture = s->capture;
    e->tips = s->tips;
    e->seen = s->seen;
    e->recorded = true;
    e->ms = now_ms();
    return CUDA_SUCCESS;
}
CU_ENTRY cuEventRecordWithFlags(Handle h, Handle stream, unsigned) { return cuEventRecord(h, stream); }
CU_ENTRY cuEventQuery(Handle h) {
    Call call;
    Event* e = events().find(h);
    if (!e) return events().unknown(h);
    if (CUresult r = refuse_captured_event(*e, "cuEventQuery")) return r;
    host_waited(e->seen);
    return CUDA_SUCCESS;
}
CU_ENTRY cuEventSynchronize(Handle h) {
    Call call;
    Event* e = events().find(h);
    if (!e) return events().unknown(h);
    if (CUresult r = refuse_captured_event(*e, "cuEventSynchronize")) return r;
    host_waited(e->seen);
    return CUDA_SUCCESS;
}
CU_ENTRY cuEventElapsedTime(float* ms, Handle start, Handle end) {
    Call call;
    Event *a = events().find(start), *b = events().find(end);
    if (!a) return events().unknown(start);
    if (!b) return events().unknown(end);
    if (a->capture || b->capture) return refuse_captured_event(a->capture ? *a : *b, "cuEventElapsedTime");
    if (!a->recorded || !b->recorded || ((a->flags | b->flags) & 2))
        return refuse(CUDA_ERROR_INVALID_HANDLE, "an event was not recorded, or made without timing");
    *ms = (float)(b->ms - a->ms);
    return CUDA_SUCCESS;
}

CU_ENTRY cuStreamBeginCapture_v2(Handle h, int mode) {
    Call call;
    Stream* s = find(h);
    if (!s) return streams().unknown(h);
    if (mode < 0 || mode > 2) return refuse(CUDA_ERROR_INVALID_VALUE, "capture mode %d", mode);
    if (is_default(h)) return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the default stream cannot be captured");
    if (CUresult r = refuse_on_captured(*s, "cuStreamBeginCapture")) return r;
    s->capture = std::make_shared<Capture>();
    s->capture->origin = h;
    s->capture->id = g_next_capture++;
    s->tips.clear();
    captures().push_back(s->capture);
    return CUDA_SUCCESS;
}
CU_ENTRY cuStreamEndCapture(Handle h, Handle* graph) {
    Call call;
    *graph = nullptr;
    Stream* s = find(h);
    if (!s) return streams().unknown(h);
    std::shared_ptr<Capture> c = s->capture;
    if (!c)
        return refuse(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "cuStreamEndCapture: this stream is not being captured");
    if (c->origin != h) {
        spoil(*c, "an end in another stream");
        return refuse(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "the capture began in another stream");
    }
    const bool joined = all_joined(c, *s);
    leave(c);
    if (c->invalid)
        return refuse(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "this capture was spoiled by %s", c->spoiled_by.c_str());
    if (!joined)
        return refuse(CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
                      "another stream's work was not joined back by an event before the capture ended");
    *graph = adopt_graph(std::make_unique<Graph>(std::move(c->graph)));
    return CUDA_SUCCESS;
}
CU_ENTRY cuStreamIsCapturing(Handle h, int* status) {
    Call call;
    Stream* s = find(h);
    if (!s) return streams().unknown(h);
    *status = !s->capture ? 0 : s->capture->invalid ? 2 : 1;
    return CUDA_SUCCESS;
}
CU_ENTRY cuStreamGetCaptureInfo_v2(Handle h, int* status, u64* id, Handle* graph, const Handle** after, size_t* n) {
    if (graph) *graph = nullptr;
    if (after) *after = nullptr;
    if (n) *n = 0;
    if (CUresult r = cuStreamIsCapturing(h, status)) return r;
    Call call;
    if (id) *id = *status ? find(h)->capture->id : 0;
    return CUDA_SUCCESS;
}
CU_ENTRY cuStreamGetCaptureInfo_v3(Handle h, int* status, u64* id, Handle* graph, const Handle** after,
                                   const void** edges, size_t* n) {
    if (edges) *edges = nullptr;
    return cuStreamGetCaptureInfo_v2(h, status, id, graph, after, n);
}
CU_ENTRY cuThreadExchangeStreamCaptureMode(int* mode) {
    std::swap(*mode, t_capture_mode);
    return CUDA_SUCCESS;
}
