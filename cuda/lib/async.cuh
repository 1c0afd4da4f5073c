/* async.cuh - cp.async: 16 bytes from global to shared memory, in groups of the calling thread; and what a kernel that
 * is launched ahead does: it asks for weights while the launch before it still runs, then waits for it.
 *
 * The fast host build copies at once. The check build lets the bytes land at the wait that covers their group and
 * poisons the destination until then; reading it earlier is reported.
 */
#pragma once
#include "gmem.cuh"
#include "smem.cuh"

#ifdef __CUDACC__

template <class S, class T>
DEV void cp_async16(S&& to, i64 to_elem, T* from, i64 from_elem) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared_base(to) + to_elem)),
                 "l"(from + from_elem)
                 : "memory");
}
DEV void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEV void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#elif defined(SIMT_WATCHED)

template <class S, class T>
DEV void cp_async16(S&& to, i64 to_elem, gptr<T> from, i64 from_elem SITE) {
    simt_async_copy((void*)(shared_base(to) + to_elem), from.p + from_elem, from.span, loc);
}
DEV void cp_async_commit(simt::Loc loc = simt::Loc::current()) { simt_async_commit(loc); }
template <int N>
DEV void cp_async_wait(simt::Loc loc = simt::Loc::current()) {
    simt_async_wait(N, loc);
}

#else

template <class S, class T>
DEV void cp_async16(S&& to, i64 to_elem, gptr<T> from, i64 from_elem) {
    memcpy((void*)(shared_base(to) + to_elem), (const void*)(from.p + from_elem), 16);
}
DEV void cp_async_commit() {}
template <int N>
DEV void cp_async_wait() {}

#endif

/* Launched ahead (`Kernel.weights` in the launch table), a kernel may start while the one before it still runs. Before
 * its grid_wait() it reads weights and nothing else, and it writes no global memory; every thread passes the wait, on
 * every path. So whoever waits for this kernel waits for all before it, and nobody else needs to.
 * grid_release() lets the next kernel of the stream start, if that one is launched ahead. It stands after the wait: what
 * a kernel asks for early is then written by no launch but the one just before it, which writes no weights.
 */
#ifdef __CUDACC__

/// Wait until the kernels before this one have finished and their writes can be seen. Nothing when launched plainly.
DEV void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void grid_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// Ask for the line of element i; the thread does not wait for it.
template <class T>
DEV void prefetch(T* p, i64 i) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p + i));
}

#elif defined(SIMT_WATCHED)

DEV void grid_wait(simt::Loc loc = simt::Loc::current()) { simt_grid_wait(loc); }
DEV void grid_release(simt::Loc loc = simt::Loc::current()) { simt_grid_release(loc); }
template <class T>
DEV void prefetch(gptr<T> p, i64 i SITE) {
    simt_prefetch(p.p + i, sizeof(T), p.span, loc);
}

#else

DEV void grid_wait() {}
DEV void grid_release() {}
template <class T>
DEV void prefetch(gptr<T>, i64 SITE) {}

#endif

/// Ask for n elements of weights, a line a thread, before the wait.
template <int THREADS, class T>
DEV void prefetch_all(gptr<T> p, int n SITE) {
    constexpr int kLine = 128 / sizeof(T);
    for (int i = threadIdx.x * kLine; i < n; i += THREADS * kLine) prefetch(p, i SITE_ARG);
}
