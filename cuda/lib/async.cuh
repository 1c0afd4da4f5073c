/* async.cuh - cp.async: 16 bytes from global to shared memory, in groups of the calling thread; and the two halves of
 * a programmatic dependent launch.
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

/// The next kernel of the stream may start; it must not touch what this one writes before its grid_wait().
DEV void grid_release() {
#ifdef __CUDACC__
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// Wait until the kernels before this one have finished and their writes can be seen. Nothing when launched plainly.
DEV void grid_wait() {
#ifdef __CUDACC__
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
