/* graph.cpp - graphs: what a capture recorded, made executable by a deep copy, replayed in an order
 * that its edges allow. */
#include "driver.h"

namespace simt {
namespace {

Registry<Graph>& graphs() {
    static auto& r = *new Registry<Graph>("graph", 7);
    return r;
}
Registry<Graph>& executables() {
    static auto& r = *new Registry<Graph>("executable graph", 8);
    return r;
}

// A node's handle is its graph's with the index in bits 52..., far from any registry's tag.
Handle node_handle(Handle graph, size_t i) { return (Handle)((u64)graph ^ ((u64)(i + 1) << 52)); }

CUresult instantiate(Handle* out, Handle h) {
    Graph* g = graphs().find(h);
    if (!g) return graphs().unknown(h);
    auto e = std::make_unique<Graph>();
    e->nodes = copy_nodes(g->nodes);
    *out = executables().add(std::move(e));
    return CUDA_SUCCESS;
}

}  // namespace

std::vector<Node> copy_nodes(const std::vector<Node>& nodes) {
    std::vector<Node> copies = nodes;
    for (auto& n : copies)
        if (n.kind == Node::kLaunch) rebind(n.launch);
    return copies;
}

Handle adopt_graph(std::unique_ptr<Graph> graph) { return graphs().add(std::move(graph)); }

}  // namespace simt

using namespace simt;

CU_ENTRY cuGraphInstantiateWithFlags(Handle* out, Handle graph, u64) {
    Call call;
    return instantiate(out, graph);
}
CU_ENTRY cuGraphInstantiateWithParams(Handle* out, Handle graph, void*) {
    Call call;
    return instantiate(out, graph);
}
CU_ENTRY cuGraphLaunch(Handle h, Handle stream) {
    Call call;
    if (CUresult r = need_context()) return r;
    if (CUresult r = check_stream(stream)) return r;
    Graph* g = executables().find(h);
    if (!g) return executables().unknown(h);
    if (is_capturing(stream)) {  // a graph within a graph: its nodes, in order
        for (auto& n : copy_nodes(g->nodes))
            if (CUresult r = submit(stream, std::move(n))) return r;
        return CUDA_SUCCESS;
    }
    if (stream_is_default(stream))
        if (CUresult r = forbid_in_capture("a graph launch on the default stream")) return r;
    return submit_graph(stream, *g);
}
CU_ENTRY cuGraphUpload(Handle h, Handle stream) {
    Call call;
    if (CUresult r = check_stream(stream)) return r;
    return executables().find(h) ? CUDA_SUCCESS : executables().unknown(h);
}
CU_ENTRY cuGraphExecDestroy(Handle h) {
    Call call;
    return executables().remove(h) ? CUDA_SUCCESS : executables().unknown(h);
}
CU_ENTRY cuGraphDestroy(Handle h) {
    Call call;
    return graphs().remove(h) ? CUDA_SUCCESS : graphs().unknown(h);
}
CU_ENTRY cuGraphGetNodes(Handle h, Handle* nodes, size_t* n) {
    Call call;
    Graph* g = graphs().find(h);
    if (!g) return graphs().unknown(h);
    if (nodes)
        for (size_t i = 0; i < *n; i++) nodes[i] = i < g->nodes.size() ? node_handle(h, i) : nullptr;
    if (!nodes || *n > g->nodes.size()) *n = g->nodes.size();
    return CUDA_SUCCESS;
}
CU_ENTRY cuGraphGetEdges_v2(Handle h, Handle* from, Handle* to, void*, size_t* n) {
    Call call;
    Graph* g = graphs().find(h);
    if (!g) return graphs().unknown(h);
    size_t i = 0;
    for (size_t node = 0; node < g->nodes.size(); node++)
        for (u32 before : g->nodes[node].after) {
            if (from && to && i < *n) from[i] = node_handle(h, before), to[i] = node_handle(h, node);
            i++;
        }
    if (!from || *n > i) *n = i;
    return CUDA_SUCCESS;
}
