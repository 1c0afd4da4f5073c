/* sample.cu - one token a row from its logits: greedy, or temperature with top-k, top-p and min-p, then Gumbel-max.
 *
 *   sample   z = l / T.  K1 = the top_k largest z; K2 = the shortest prefix of K1, largest first, that holds top_p of K1's
 *            mass; K3 = those of K2 with exp(z - max z) >= min_p. Token = argmax over K3 of z + g, g Gumbel noise.
 *            T = 0: argmax of l. Ties go to the lowest token id, in every set and in the result.
 *
 * Layout      out: i32 [R, 4] = token (-1: a logit is NaN or none is finite), bits of its f32 log-probability under the
 *             untempered distribution, tokens kept, 0. logits: f32 [R, V]. params: i32 [R, 8] = bits of T, top_k (0: off),
 *             bits of top_p (>= 1: off), bits of min_p (<= 0: off), seed low, seed high, 0, 0. pos: i32 [R].
 * Launch      grid R, block 1024: one block a row.
 * Arithmetic  z and exp(z - max) in f32; masses are exp(z - max) * 2^40 as integers, so that sums of them do not depend on
 *             the order and a threshold is exact. Thresholds by radix select, 8 bits a pass. Noise: Philox4x32-10, key =
 *             seed, counter = (token / 4, pos + 1, 0, 0), word token % 4: it depends on seed, position and token only.
 * Traffic     reads 4 V bytes of logits a pass: 3 passes, 4 more for top_k, 4 for top_p, 4 where ties are cut. Writes 16.
 * Why so      no sort and no list: 129,280 logits are half a megabyte that stays in L2. Integer masses make the truncated
 *             set a function of the logits, whatever the number of threads.
 */
#include "common.cuh"

constexpr int kThreads = 1024;
constexpr int kBins = 256;
constexpr float kMassOne = 1099511627776.0f;  // 2^40; 2^17 tokens of it stay below 2^57

struct SampleSmem {
    sarr<u32, kBins> low;  // a bin's weight by halves: 64-bit atomics on shared memory are a loop of exchanges
    sarr<u32, kBins> high;
    sarr<u64, 32> best;
    sarr<u64, 2> found;  // the digit, and the weight above it
};

DEV u64 weight_of(SampleSmem& sm, int bin) { return (u64)sm.high[bin] << 32 | sm.low[bin]; }
DEV void add_weight(SampleSmem& sm, u32 bin, u64 weight) {
    const u32 mine = (u32)weight, old = atomicAdd(&sm.low[bin], mine);
    const u32 rest = (u32)(weight >> 32) + (u32)(old + mine < old);  // the carry is whose add went over
    if (rest) atomicAdd(&sm.high[bin], rest);
}

// rises with the float; the two zeros are one key
DEV u32 order_key(float v) {
    const u32 u = __float_as_uint(v + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

DEV u64 block_max_u64(SampleSmem& sm, u64 v) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int m = 16; m; m >>= 1) v = max(v, shfl_xor(v, m));
    sync_block();
    if (lane == 0) sm.best[warp] = v;
    sync_block();
    v = sm.best[lane];
    for (int m = 16; m; m >>= 1) v = max(v, shfl_xor(v, m));
    return v;
}

DEV u64 block_sum_u64(SampleSmem& sm, u64 v) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int m = 16; m; m >>= 1) v += shfl_xor(v, m);
    sync_block();
    if (lane == 0) sm.best[warp] = v;
    sync_block();
    v = sm.best[lane];
    for (int m = 16; m; m >>= 1) v += shfl_xor(v, m);
    return v;
}

// The largest key t with weight(keys > t) < target <= weight(keys >= t), target >= 1 and at most the whole weight;
// `above` gets weight(keys > t). entry(v, key, weight) says whether token v counts. Every thread calls it.
template <class Entry>
DEV u32 radix_select(SampleSmem& sm, int vocab, u64 target, u64& above, Entry entry) {
    u32 prefix = 0;
    above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        sync_block();
        if (threadIdx.x < kBins) sm.low[threadIdx.x] = 0, sm.high[threadIdx.x] = 0;
        sync_block();
        for (int v = threadIdx.x; v < vocab; v += kThreads) {
            u32 key;
            u64 weight;
            const bool counts = entry(v, key, weight);
            if (counts && (shift == 24 || key >> (shift + 8) == prefix)) add_weight(sm, key >> shift & 255u, weight);
        }
        sync_block();
        if (threadIdx.x < 32) {  // lane i looks after bins 8 i .. 8 i + 7; the search runs from the top bin down
            const int lane = threadIdx.x;
            u64 mine = 0;
            for (int b = 0; b < 8; b++) mine += weight_of(sm, 8 * lane + b);
            u64 upto = mine;  // weight of my bins and all above
            for (int d = 1; d < 32; d *= 2) {
                const u64 other = shfl_down(upto, d);
                if (lane + d < 32) upto += other;
            }
            const u64 higher = above + upto - mine;
            if (higher < target && target <= above + upto) {
                u64 sum = higher;
                int b = 7;
                for (; b > 0 && sum + weight_of(sm, 8 * lane + b) < target; b--) sum += weight_of(sm, 8 * lane + b);
                sm.found[0] = 8 * lane + b;
                sm.found[1] = sum;
            }
        }
        sync_block();
        prefix = prefix << 8 | (u32)sm.found[0];
        above = sm.found[1];
    }
    return prefix;
}

struct Words4 {
    u32 w[4];
};

DEV Words4 philox(u32 key0, u32 key1, u32 c0, u32 c1) {
    u32 c[4] = {c0, c1, 0, 0};
    for (int round = 0; round < 10; round++) {
        const u64 p0 = (u64)0xD2511F53u * c[0], p1 = (u64)0xCD9E8D57u * c[2];
        const u32 n0 = (u32)(p1 >> 32) ^ c[1] ^ key0, n2 = (u32)(p0 >> 32) ^ c[3] ^ key1;
        c[0] = n0;
        c[1] = (u32)p1;
        c[2] = n2;
        c[3] = (u32)p0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return {{c[0], c[1], c[2], c[3]}};
}

// Gumbel noise from 32 random bits: -log(E), E = -log(1 - w); small w, the tail that wins, keeps its resolution
DEV float gumbel(u32 bits) {
    const float w = fminf(((float)bits + 0.5f) * 0x1p-32f, 0x1.fffffep-1f);
    return -log_f(-log1p_f(-w));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    sample(gptr<i32> out, gptr<const float> logits, gptr<const i32> params, gptr<const i32> pos, int vocab) {
    SMEM(SampleSmem, sm);
    const i64 row = blockIdx.x;
    const gptr<const float> l = logits + row * vocab;
    const float temperature = __uint_as_float((u32)params[row * 8]);
    const int top_k = params[row * 8 + 1];
    const float top_p = __uint_as_float((u32)params[row * 8 + 2]), min_p = __uint_as_float((u32)params[row * 8 + 3]);
    const bool greedy = !(temperature > 0.0f);
    const float inv_t = greedy ? 1.0f : 1.0f / temperature;

    u64 best = 0, bad = 0;
    for (int v = threadIdx.x; v < vocab; v += kThreads) {
        const float x = l[v];
        if (!(x == x)) bad = 1;
        best = max(best, (u64)order_key(x) << 32 | (0xffffffffu - (u32)v));
    }
    best = block_max_u64(sm, best);
    bad = block_max_u64(sm, bad);
    const int argmax = (int)(0xffffffffu - (u32)best);
    const float top = l[argmax];
    if (bad || !(fabsf(top) <= 3.402823466e38f)) {  // uniform over the block
        if (threadIdx.x == 0) {
            out[row * 4] = -1;
            for (int i = 1; i < 4; i++) out[row * 4 + i] = 0;
        }
        return;
    }
    float total = 0.0f;  // the untempered mass, for the log-probability
    for (int v = threadIdx.x; v < vocab; v += kThreads) total += exp_f(l[v] - top);
    total = block_sum<kThreads>(total);

    int token = argmax;
    u64 kept = 1;
    if (!greedy) {
        const float z_top = top * inv_t;
        auto weigh = [=](float x) { return exp_f(x * inv_t - z_top); };
        // the kept set so far: keys above `cut`, and those equal to it with an id up to `last_id`
        u32 cut = 0;
        u64 ties = ~0ull, above = 0;
        u64 mass = 0;
        if (top_k > 0 && top_k < vocab) {
            cut = radix_select(sm, vocab, (u64)top_k, above, [=](int v, u32& key, u64& weight) {
                key = order_key(l[v] * inv_t);
                weight = 1;
                return true;
            });
            ties = (u64)top_k - above;
        }
        if (top_p < 1.0f) {
            u64 mine = 0, equal = 0, equal_mass = 0;
            for (int v = threadIdx.x; v < vocab; v += kThreads) {
                const float x = l[v];
                const u32 key = order_key(x * inv_t);
                const u64 m = (u64)(weigh(x) * kMassOne);
                if (key > cut) mine += m;
                if (key == cut) equal++, equal_mass = max(equal_mass, m);
            }
            mass = block_sum_u64(sm, mine);
            equal = block_sum_u64(sm, equal);
            equal_mass = block_max_u64(sm, equal_mass);
            mass += min(ties, equal) * equal_mass;
            const u64 want = (u64)((double)top_p * (double)mass);
            const u64 target = want < 1 ? 1 : want;
            u64 higher;
            const u32 at = radix_select(sm, vocab, target, higher, [=](int v, u32& key, u64& weight) {
                const float x = l[v];
                key = order_key(x * inv_t);
                weight = (u64)(weigh(x) * kMassOne);
                return key >= cut;
            });
            u64 each = 0;
            for (int v = threadIdx.x; v < vocab; v += kThreads)
                if (order_key(l[v] * inv_t) == at) each = (u64)(weigh(l[v]) * kMassOne);
            each = block_max_u64(sm, each);
            const u64 needed = each ? (target - higher + each - 1) / each : 1;
            ties = at == cut ? min(ties, needed) : needed;
            cut = at;
        }
        u64 equal = 0;
        for (int v = threadIdx.x; v < vocab; v += kThreads) equal += order_key(l[v] * inv_t) == cut;
        equal = block_sum_u64(sm, equal);
        u32 last_id = 0xffffffffu;
        if (ties < equal) {  // uniform: cut among equals by id, lowest first
            u64 skipped;
            last_id = ~radix_select(sm, vocab, ties, skipped, [=](int v, u32& key, u64& weight) {
                key = ~(u32)v;
                weight = 1;
                return order_key(l[v] * inv_t) == cut;
            });
        }
        best = 0;
        kept = 0;
        const u32 seed0 = (u32)params[row * 8 + 4], seed1 = (u32)params[row * 8 + 5], at = (u32)pos[row] + 1u;
        for (int v0 = threadIdx.x * 4; v0 < vocab; v0 += kThreads * 4) {
            const Words4 noise = philox(seed0, seed1, (u32)v0 / 4, at);
            for (int i = 0; i < 4; i++) {
                const int v = v0 + i;
                if (v >= vocab) break;
                const float x = l[v];
                const u32 key = order_key(x * inv_t);
                if (key < cut || (key == cut && (u32)v > last_id)) continue;
                if (v != argmax && weigh(x) < min_p) continue;
                kept++;
                best = max(best, (u64)order_key(x * inv_t + gumbel(noise.w[i])) << 32 | (0xffffffffu - (u32)v));
            }
        }
        best = block_max_u64(sm, best);
        kept = block_sum_u64(sm, kept);
        token = (int)(0xffffffffu - (u32)best);
    }
    if (threadIdx.x == 0) {
        out[row * 4] = token;
        out[row * 4 + 1] = (i32)__float_as_uint(l[token] - top - log_f(total));
        out[row * 4 + 2] = (i32)kept;
        out[row * 4 + 3] = 0;
    }
}
EXPORT(sample)
