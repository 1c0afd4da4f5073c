/* probe.cu - small kernels that do one thing each, right or wrong: what the driver's tests launch. */
#include "common.cuh"

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
    rms_norm(gptr<float> y, gptr<const float> x, gptr<const float> w, int width, float eps) {
    const i64 row = (i64)blockIdx.x * width;
    float sum_sq = 0.0f;
    for (int d = threadIdx.x; d < width; d += kThreads) {
        const float v = x[row + d];
        sum_sq += v * v;
    }
    const float scale = 1.0f / sqrtf(block_sum<kThreads>(sum_sq) / width + eps);
    for (int d = threadIdx.x; d < width; d += kThreads) y[row + d] = x[row + d] * scale * w[d];
}
EXPORT(rms_norm)

extern "C" __global__ void copy_at(gptr<int> to, gptr<const int> from, int to_at, int from_at) {
    if (threadIdx.x == 0) to[to_at] = from[from_at];
}
EXPORT(copy_at)

extern "C" __global__ void vector_at(gptr<float> to, gptr<const float> from, int at) {
    if (threadIdx.x == 0) gst<float4>(to, 0, gld<float4>(from, at));
}
EXPORT(vector_at)

extern "C" __global__ void skip_barrier(gptr<int> out) {
    if (threadIdx.x != 5) sync_block();
    out[threadIdx.x] = 1;
}
EXPORT(skip_barrier)

extern "C" __global__ void two_barriers(gptr<int> out) {
    if (threadIdx.x < 128)
        sync_block();
    else
        sync_block();
    out[threadIdx.x] = 1;
}
EXPORT(two_barriers)

extern "C" __global__ void half_shuffle(gptr<int> out) {
    int v = 0;
    if ((threadIdx.x & 31) < 16) v = shfl((int)threadIdx.x, 0);
    out[threadIdx.x] = v;
}
EXPORT(half_shuffle)

extern "C" __global__ void two_operations(gptr<int> out) {
    int v;
    if (threadIdx.x & 1)
        v = shfl(1, 0);
    else
        v = (int)ballot(true);
    out[threadIdx.x] = v;
}
EXPORT(two_operations)

extern "C" __global__ void returned_lane(gptr<int> out) {
    if ((threadIdx.x & 31) == 3) return;
    out[threadIdx.x] = (int)ballot(true);
}
EXPORT(returned_lane)

struct Shared {
    sarr<float, 256> a;
    sarr<float, 4> part;
};

/// Another warp's value, read without a barrier.
extern "C" __global__ void read_too_early(gptr<float> out, gptr<const float> in, int guarded) {
    SMEM(Shared, sm);
    sm.a[threadIdx.x] = in[threadIdx.x];
    if (guarded) sync_block();
    out[threadIdx.x] = sm.a[threadIdx.x ^ 33];
}
EXPORT(read_too_early)

/// The second round overwrites what slow warps have yet to read.
extern "C" __global__ void write_too_early(gptr<float> out, gptr<const float> in, int guarded) {
    SMEM(Shared, sm);
    float sum = 0.0f;
    for (int round = 0; round < 2; round++) {
        sm.a[threadIdx.x] = in[threadIdx.x] + (float)round;
        sync_block();
        sum += sm.a[threadIdx.x ^ 33];
        if (guarded) sync_block();
    }
    out[threadIdx.x] = sum;
}
EXPORT(write_too_early)

/// Warp 0 reads what warp 1 then overwrites; nobody looks again.
extern "C" __global__ void overwrite(gptr<float> out, gptr<const float> in, int guarded) {
    SMEM(Shared, sm);
    const int t = threadIdx.x;
    sm.a[t] = in[t];
    sync_block();
    if (t < 32) out[t] = sm.a[t + 32];
    if (guarded) sync_block();
    if (t >= 32 && t < 64) sm.a[t] = 0.0f;
}
EXPORT(overwrite)

extern "C" __global__ void two_writers(gptr<float> out) {
    SMEM(Shared, sm);
    sm.part[0] = (float)threadIdx.x;
    sync_block();
    out[threadIdx.x] = sm.part[0];
}
EXPORT(two_writers)

/// Within a warp sync_warp is enough; across warps it is not.
extern "C" __global__ void warp_exchange(gptr<float> out, gptr<const float> in, int distance, int guarded) {
    SMEM(Shared, sm);
    sm.a[threadIdx.x] = in[threadIdx.x];
    if (guarded == 1) sync_warp();
    if (guarded == 2) shfl(1, 0);  // meets, but orders no memory
    out[threadIdx.x] = sm.a[threadIdx.x ^ distance];
}
EXPORT(warp_exchange)

extern "C" __global__ void unwritten(gptr<float> out) {
    SMEM(Shared, sm);
    out[threadIdx.x] = sm.a[threadIdx.x];
}
EXPORT(unwritten)

extern "C" __global__ void shared_at(gptr<float> out, int at, int kind) {
    SMEM(Shared, sm);
    SMEM_DYN(float, tail, sizeof(Shared));
    if (threadIdx.x == 0) {
        if (kind == 0) sm.part[at] = 1.0f;
        if (kind == 1) tail[at] = 1.0f;
        if (kind == 2) (sm.part + at)[0] = 1.0f;
        out[0] = 2.0f;
    }
}
EXPORT(shared_at)

/// mode 0 right; 1 read before the wait; 2 no barrier after the wait; 3 returns without a wait.
extern "C" __global__ void async_copy(gptr<float> out, gptr<const float> in, int mode) {
    SMEM(Shared, sm);
    const int t = threadIdx.x;
    if (t < 64) cp_async16(sm.a, 4 * t, in, 4 * t);
    cp_async_commit();
    if (mode == 1) {
        sync_block();
        out[t] = sm.a[t];
    }
    if (mode != 3) cp_async_wait<0>();
    if (mode != 2) sync_block();
    out[t] = mode == 3 ? 0.0f : (float)sm.a[t ^ 4];
}
EXPORT(async_copy)

/// Two groups in flight: waiting for all but one lands the first only.
extern "C" __global__ void async_groups(gptr<float> out, gptr<const float> in, int open) {
    SMEM(Shared, sm);
    const int t = threadIdx.x;
    if (t < 32) cp_async16(sm.a, 4 * t, in, 4 * t);
    cp_async_commit();
    if (t < 32) cp_async16(sm.a, 128 + 4 * t, in, 128 + 4 * t);
    cp_async_commit();
    cp_async_wait<1>();
    sync_block();
    out[t & 127] = sm.a[t & 127];
    if (open) out[128 + (t & 127)] = sm.a[128 + (t & 127)];
    cp_async_wait<0>();
    sync_block();
    out[128 + (t & 127)] = sm.a[128 + (t & 127)];
}
EXPORT(async_groups)

extern "C" __global__ void named_barriers(gptr<int> out, gptr<const int> in) {
    SMEM(Shared, sm);
    const int t = threadIdx.x, half = t / 128;
    sm.a[t] = (float)in[t];
    bar_sync(1 + half, 128);
    out[t] = (int)sm.a[t ^ 64];
}
EXPORT(named_barriers)

extern "C" __global__ void collectives(gptr<float> out, gptr<const float> in, gptr<u32> bits) {
    const int t = threadIdx.x, lane = t & 31;
    const float v = in[t];
    out[t] = warp_sum(v);
    out[256 + t] = warp_max(v);
    out[512 + t] = warp_min(v);
    out[768 + t] = block_sum<kThreads>(v);
    out[1024 + t] = block_max<kThreads>(v);
    out[1280 + t] = shfl(v, (lane * 7 + 3) & 31);
    out[1536 + t] = shfl_xor(v, 5);
    out[1792 + t] = shfl_down(v, 3);
    out[2048 + t] = shfl_up(v, 3);
    out[2304 + t] = group_sum(v, 8);
    bits[t] = ballot(v > 0.0f);
    bits[256 + t] = any_lane(lane == 9 && v > 0.0f) ? 1u : 0u;
    bits[512 + t] = all_lanes(v < 1e9f) ? 1u : 0u;
    bits[768 + t] = warp_max((u32)t);
    bits[1024 + t] = (u32)warp_sum(t);
}
EXPORT(collectives)

extern "C" __global__ void counters(gptr<u32> total, gptr<int> high) {
    SMEM_DYN(u32, local, 0);
    if (threadIdx.x == 0) local[0] = 0;
    sync_block();
    atomicAdd(local + 0, threadIdx.x);
    atomicAdd(&total[1], 1u);
    atomicMax(high + 0, (int)(threadIdx.x * 7 % 256));
    sync_block();
    if (threadIdx.x == 0) atomicAdd(total + 0, (u32)local[0]);
}
EXPORT(counters)

/// How blocks meet in global memory: 0 each its own byte; 1 all write one; 2 one reads what another wrote;
/// 3 one writes what others read; 4 atomics on one; 5 an atomic and a plain write.
extern "C" __global__ void blocks_meet(gptr<u8> bytes, gptr<u32> word, int kind) {
    const int b = blockIdx.x;
    if (threadIdx.x != 0) return;
    if (kind == 0) bytes[b] = (u8)b;
    if (kind == 1) bytes[0] = (u8)b;
    if (kind == 2) bytes[b] = b ? bytes[b - 1] : (u8)7;
    if (kind == 3) {
        if (b < 3)
            bytes[8 + b] = bytes[3];
        else
            bytes[b] = 1;
    }
    if (kind >= 4) atomicAdd(word + 0, 1u);
    if (kind == 5 && b == 2) word[0] = 5u;
}
EXPORT(blocks_meet)

extern "C" __global__ void many_sums(gptr<float> out, gptr<const float> in) {
    const int t = threadIdx.x;
    float v[5];
    for (int i = 0; i < 5; i++) v[i] = in[t] * (float)(i + 1);
    grid_wait();
    warp_sums(v);
    grid_release();
    for (int i = 0; i < 5; i++) out[256 * i + t] = v[i];
}
EXPORT(many_sums)

extern "C" __global__ void spread_sums(gptr<float> out, gptr<const float> in) {
    const int t = threadIdx.x;
    float v[16];
    for (int i = 0; i < 16; i++) v[i] = in[t] * (float)(i + 1);
    out[t] = warp_sums_spread(v);
}
EXPORT(spread_sums)

/// stride: the lanes' distance in floats; what a warp request costs.
extern "C" __global__ void strided(gptr<float> out, gptr<const float> in, int stride) {
    SMEM_DYN(float, s, 0);
    const int lane = threadIdx.x;
    s[lane * stride] = in[lane * stride];
    sync_warp();
    out[lane] = s[lane * stride];
}
EXPORT(strided)

extern "C" __global__ void spread(gptr<float> out, gptr<const float> in) {
    const i64 i = (i64)blockIdx.x * kThreads + threadIdx.x;
    out[i] = in[i] + 1.0f;
}
EXPORT(spread)

extern "C" __global__ void places(gptr<u32> out) {
    const u32 t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const u32 b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    out[b * (blockDim.x * blockDim.y * blockDim.z) + t] = b * 1000 + t;
}
EXPORT(places)
