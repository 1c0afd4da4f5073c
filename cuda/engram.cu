/* engram.cu - n-gram rows to activations, and the gate that adds their value to the streams (model-text 9.3).
 *
 *   engram_decode_*  e[r, c hd + j] = e4m3(rows[r,c,j]) * 2^(rows[r,c,hd + j/32] - 127)
 *   engram_gate      dot = sum_d x[r,s,d] qw[s,d] kw[s,d] key[s,d] / (rms(x[r,s]) rms(key[s]) sqrt(D)),
 *                    rms(v) = sqrt(mean(v^2) + eps);  g = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot));
 *                    x[r,s,d] += g value[d],  key[s] = kv[r, s D ..], value = kv[r, S D ..]
 *
 * Layout      rows: u8 [R, C, hd + hd/32], a row's codes, then its scales, hd a multiple of 32; e: A [R, C hd], A = f32
 *             or bf16. x: f32 [R, S, D], in place; kv: f32 [R, (S + 1) D]; qw, kw: f32 [S, D]; shut: i32 [R] or null,
 *             not 0 leaves the row's streams as they are. D is a multiple of 4.
 * Launch      engram_decode: grid ceil(R C hd / 1024), block 128, a thread eight columns of one row.
 *             engram_gate: grid (S, R), block 256, shared memory 4 D: a block owns one stream of one row.
 * Arithmetic  f32. A decoded value is exact, then rounded once to A. The three sums of the gate: float4 i of a stream
 *             is added by thread i % 256 in rising i, fmaf in rising d, a product as (x qw) (kw key); then lanes by
 *             xor-shuffle, then warps in rising order. A row's bits depend on nothing but the row.
 * Traffic     engram_decode reads R C (hd + hd/32) bytes and writes R C hd sizeof(A). engram_gate reads 20 R S D + 4 R
 *             (shut) bytes, writes 4 R S D: x comes back from shared memory, value is read once a stream.
 * Why so      A token has 6 KB of rows and 340 KB of gate operands: launches cost more than bytes. The gate needs a
 *             whole stream before it can add anything, hence one block a stream and one launch.
 */
#include "common.cuh"

constexpr int kDecode = 128;
constexpr int kGate = 256;
constexpr int kScaleBlock = 32;
constexpr float kDotFloor = 1e-6f;

DEV void store8(gptr<float> e, i64 i, const float (&v)[8]) {
    gst<float4>(e, i, float4{v[0], v[1], v[2], v[3]});
    gst<float4>(e, i + 4, float4{v[4], v[5], v[6], v[7]});
}
DEV void store8(gptr<bf16> e, i64 i, const float (&v)[8]) {
    gst<uint4>(e, i,
               uint4{bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7])});
}

template <class A>
DEV void decode_rows(gptr<A> e, gptr<const u8> rows, i64 n_rows, int head_dim) {
    const i64 i = ((i64)blockIdx.x * kDecode + threadIdx.x) * 8;
    const i64 row = i / head_dim;
    grid_release();
    if (row >= n_rows) return;
    const int column = (int)(i - row * head_dim), row_bytes = head_dim + head_dim / kScaleBlock;
    const i64 first = row * row_bytes;
    float v[8];
    if (row_bytes % 8 == 0) {
        e4m3x8_to_f32(gld<u64>(rows, first + column), v);
    } else {  // rows of 32 or 64 columns, say, do not start on eight bytes
        for (int k = 0; k < 8; k++) v[k] = e4m3_to_f32(rows[first + column + k]);
    }
    const float scale = ue8m0_to_f32(rows[first + head_dim + column / kScaleBlock]);
    for (int k = 0; k < 8; k++) v[k] *= scale;
    store8(e, i, v);
}

extern "C" __global__ void __launch_bounds__(kDecode)
    engram_decode_f32(gptr<float> e, gptr<const u8> rows, int n_rows, int head_dim) {
    decode_rows<float>(e, rows, n_rows, head_dim);
}
EXPORT(engram_decode_f32)

extern "C" __global__ void __launch_bounds__(kDecode)
    engram_decode_bf16(gptr<bf16> e, gptr<const u8> rows, int n_rows, int head_dim) {
    decode_rows<bf16>(e, rows, n_rows, head_dim);
}
EXPORT(engram_decode_bf16)

extern "C" __global__ void __launch_bounds__(kGate)
    engram_gate(gptr<float> x, gptr<const float> kv, gptr<const float> qw, gptr<const float> kw, gptr<const i32> shut,
                int width, float eps) {
    SMEM_DYN(float, kept, 0);  // each thread reads back only what it wrote itself
    const int s = blockIdx.x, n_streams = gridDim.x;
    const i64 row = blockIdx.y;
    prefetch_all<kGate>(qw + (i64)s * width, width);
    prefetch_all<kGate>(kw + (i64)s * width, width);
    grid_wait();
    grid_release();
    if (shut != nullptr && shut[row] != 0) return;  // the whole block: no thread waits for another
    const i64 stream = (row * n_streams + s) * width, key = (row * (n_streams + 1) + s) * width;
    const i64 value = (row * (n_streams + 1) + n_streams) * width, weight = (i64)s * width;

    float dot = 0.0f, sq_x = 0.0f, sq_key = 0.0f;
    for (int d = threadIdx.x * 4; d < width; d += kGate * 4) {
        const float4 a = gld<float4>(x, stream + d), k = gld<float4>(kv, key + d);
        const float4 q = gld<float4>(qw, weight + d), w = gld<float4>(kw, weight + d);
        sst<float4>(kept, d, a);
        dot = fmaf(a.x * q.x, w.x * k.x, dot);
        dot = fmaf(a.y * q.y, w.y * k.y, dot);
        dot = fmaf(a.z * q.z, w.z * k.z, dot);
        dot = fmaf(a.w * q.w, w.w * k.w, dot);
        sq_x = fmaf(a.w, a.w, fmaf(a.z, a.z, fmaf(a.y, a.y, fmaf(a.x, a.x, sq_x))));
        sq_key = fmaf(k.w, k.w, fmaf(k.z, k.z, fmaf(k.y, k.y, fmaf(k.x, k.x, sq_key))));
    }
    dot = block_sum<kGate>(dot);
    sq_x = block_sum<kGate>(sq_x);
    sq_key = block_sum<kGate>(sq_key);

    const float n = (float)width;
    dot = dot * (1.0f / sqrtf(sq_x / n + eps)) * (1.0f / sqrtf(sq_key / n + eps)) * (1.0f / sqrtf(n));
    const float size = fabsf(dot) < kDotFloor ? kDotFloor : fabsf(dot);  // not fmaxf: a NaN must show
    const u32 sign = __float_as_uint(dot) & 0x80000000u;
    const float gate = sigmoid_f(__uint_as_float(__float_as_uint(sqrtf(size)) | sign));

    for (int d = threadIdx.x * 4; d < width; d += kGate * 4) {
        const float4 v = gld<float4>(kv, value + d);
        float4 a = sld<float4>(kept, d);
        a.x = fmaf(gate, v.x, a.x);
        a.y = fmaf(gate, v.y, a.y);
        a.z = fmaf(gate, v.z, a.z);
        a.w = fmaf(gate, v.w, a.w);
        gst<float4>(x, stream + d, a);
    }
}
EXPORT(engram_gate)
