/* sample_logprobs.cu - the likeliest tokens of a row and their log-probabilities.
 *
 *   top_logprobs   the n tokens of the largest logits, largest first, the lowest id first among equals; each with
 *                  log softmax(logits), untempered and whole.
 *
 * Layout      ids: i32 [R, n] (-1 in all of a row whose logits are NaN or +inf, or none finite), values: f32 [R, n],
 *             logits: f32 [R, V]. 1 <= n <= 20, n <= V.
 * Launch      grid R, one block a row; block 512, or 128 under the name *_small; the result does not depend on it.
 * Arithmetic  truncate.cuh's top_k set at T = 1 and its integer masses, the same log-probabilities as sample.cu's.
 * Traffic     reads 4 V bytes a pass: 3 passes, 6 to select (4 more where ties are cut). Writes 8 n.
 * Why so      a radix select finds the set, and ranks among twenty are counted: nothing is sorted.
 */
#include "common.cuh"
#include "truncate.cuh"

constexpr int kMost = 20;

struct LogprobsSmem {
    RowSmem row;
    sarr<u64, kMost> list;
    sarr<u32, 1> count;
};

template <int THREADS>
DEV void top_logprobs_body(gptr<i32> ids, gptr<float> values, gptr<const float> logits, int n, int vocab) {
    SMEM(LogprobsSmem, sm);
    const i64 row = blockIdx.x;
    const gptr<const float> l = logits + row * vocab;
    int argmax;
    float top;
    const int i = threadIdx.x;
    if (!find_top<THREADS>(l, vocab, argmax, top)) {  // uniform over the block
        if (i < n) ids[row * n + i] = -1, values[row * n + i] = 0.0f;
        return;
    }
    if (i == 0) sm.count[0] = 0;
    Settings s{};
    s.inv_t = s.top_p = 1.0f;
    s.top_k = n;
    const Kept kept = truncate_row<THREADS>(sm.row, l, vocab, s, argmax, top);
    for (int v = threadIdx.x; v < vocab; v += THREADS) {
        const float x = l[v];
        if (!kept.has(v, x)) continue;
        const u32 slot = atomicAdd(&sm.count[0], 1u);
        sm.list[slot] = (u64)kept.key(x) << 32 | (0xffffffffu - (u32)v);
    }
    // its barriers stand between the list's writers and its readers
    const float top_logprob = log_probability<THREADS>(l, vocab, argmax, top, argmax);
    if (i < n) {
        const u64 mine = sm.list[i];
        int rank = 0;
        for (int j = 0; j < n; j++) rank += sm.list[j] > mine;
        const int v = (int)(0xffffffffu - (u32)mine);
        ids[row * n + rank] = v;
        values[row * n + rank] = l[v] - top + top_logprob;
    }
}

#define TOP_LOGPROBS(suffix, THREADS)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                  \
        top_logprobs##suffix(gptr<i32> ids, gptr<float> values, gptr<const float> logits, int n, int vocab) { \
        top_logprobs_body<THREADS>(ids, values, logits, n, vocab);                                            \
    }                                                                                                         \
    EXPORT(top_logprobs##suffix)

TOP_LOGPROBS(, 512)
TOP_LOGPROBS(_small, 128)
