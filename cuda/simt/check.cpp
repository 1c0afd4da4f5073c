/* check.cpp - the check build's runtime. */
#include "driver.h"

namespace simt {
void check_prepare(Worker*) {}
void check_block_begin(Worker*) {}
void check_barrier(Worker*, const Barrier&) {}
void check_warp_passed(Warp*) {}
void check_thread_exit(Fiber*) {}
void check_reset(Worker*) {}
}  // namespace simt

SIMT_API void simt_global_access(const void*, u32, u32, bool, const simt::Span*, simt::Loc) {}
SIMT_API void simt_shared_access(const void*, u32, u32, bool, simt::Loc) {}
SIMT_API void simt_shared_atomic(const void*, u32, simt::Loc) {}
SIMT_API void simt_async_copy(void* to, const void* from, const simt::Span*, simt::Loc) { memcpy(to, from, 16); }
SIMT_API void simt_async_commit(simt::Loc) {}
SIMT_API void simt_async_wait(u32, simt::Loc) {}
