/* common.cuh - the only include of a kernel: integer names, memory, meetings, conversions, mathematics.
 *
 * Two compilers read the same kernels. NVRTC gets raw pointers and PTX; g++ gets twins over fibers, and with
 * -DSIMT_CHECK or -DSIMT_COUNT every access is checked or counted. Names and bits are the same on both.
 */
#pragma once
#include "lib/base.cuh"
#include "lib/gmem.cuh"
#include "lib/smem.cuh"
#include "lib/warp.cuh"
#include "lib/async.cuh"
#include "lib/convert.cuh"
#include "lib/mma.cuh"
#include "lib/math.cuh"
#include "lib/atomic.cuh"
#include "lib/entry.cuh"
