/* watched.h - the accesses that images of the check and count builds report to the driver. */
#pragma once
#include "block.h"

SIMT_API void simt_global_access(const void* p, u32 n_bytes, u32 align, bool store, const simt::Span* span,
                                 simt::Loc loc);
SIMT_API void simt_global_atomic(const void* p, u32 n_bytes, const simt::Span* span, simt::Loc loc);
SIMT_API void simt_shared_access(const void* p, u32 n_bytes, u32 align, bool store, simt::Loc loc);
SIMT_API void simt_shared_atomic(const void* p, u32 n_bytes, simt::Loc loc);
SIMT_API void simt_async_copy(void* to, const void* from, const simt::Span* span, simt::Loc loc);
SIMT_API void simt_async_commit(simt::Loc loc);
SIMT_API void simt_async_wait(u32 n_open, simt::Loc loc);
SIMT_API void simt_read_only(const simt::Span* span, simt::Loc loc);
SIMT_API void simt_prefetch(const void* p, u32 n_bytes, const simt::Span* span, simt::Loc loc);
SIMT_API void simt_grid_wait(simt::Loc loc);
SIMT_API void simt_grid_release(simt::Loc loc);
