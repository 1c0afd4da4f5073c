/* truncate.cuh - one row's distribution at a temperature, truncated, and the noise that draws from it.
 *
 * z = l / T. K1 = the top_k largest z; K2 = the shortest prefix of K1, largest first, that holds top_p of K1's mass;
 * K3 = those of K2 with exp(z - max z) >= min_p. Ties go to the lowest token id. T = 0: K3 is the argmax alone.
 *
 * z and exp(z - max) are f32; masses are exp(z - max) * 2^40 as integers, so that sums of them do not depend on their
 * order and a threshold is exact: a truncated set is a function of the logits, whatever the number of threads.
 * All threads of the block call every function that has THREADS, and get the same answer.
 */
#pragma once

constexpr int kBins = 256;
constexpr float kMassOne = 1099511627776.0f;  // 2^40; 2^17 tokens of it stay below 2^57
constexpr float kLargest = 0x1.fffffep+127f;

// Noise streams: one stream, seed, position and token give one number. Draws that must not know of each other differ
// in the stream.
constexpr u32 kUniformStream = 2, kResidualStream = 3;

struct RowSmem {
    sarr<u32, kBins> low;  // a bin's weight by halves: 64-bit atomics on shared memory are a loop of exchanges
    sarr<u32, kBins> high;
    sarr<u64, 2> found;  // the digit, and the weight above it
};

DEV u64 weight_of(RowSmem& sm, int bin) { return (u64)sm.high[bin] << 32 | sm.low[bin]; }
DEV void add_weight(RowSmem& sm, u32 bin, u64 weight) {
    const u32 mine = (u32)weight, old = atomicAdd(&sm.low[bin], mine);
    const u32 rest = (u32)(weight >> 32) + (u32)(old + mine < old);  // the carry is whose add went over
    if (rest) atomicAdd(&sm.high[bin], rest);
}

// rises with the float; the two zeros are one key, and no number's key is 0
DEV u32 order_key(float v) {
    const u32 u = __float_as_uint(v + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The best token so far; key 0: none. A thread offers its tokens by rising id, so that the lowest of equals stays.
struct Best {
    u32 key, id;
    DEV void offer(u32 other, int v) {
        if (other > key) key = other, id = (u32)v;
    }
};

template <int THREADS>
DEV Best block_best(Best mine) {
    const u32 key = block_max<THREADS>(mine.key);
    const u32 lowest = block_max<THREADS>(key && mine.key == key ? ~mine.id : 0u);
    return {key, ~lowest};
}

// Sum of u64 below 2^57 in all: three sums of 32 bits, which meet less often than one of 64.
template <int THREADS>
DEV u64 block_sum_u64(u64 v) {
    const u64 a = block_sum<THREADS>((u32)v & 0xfffffu), b = block_sum<THREADS>((u32)(v >> 20) & 0xfffffu);
    return a + (b << 20) + ((u64)block_sum<THREADS>((u32)(v >> 40)) << 40);
}

// The largest key t with weight(keys > t) < target <= weight(keys >= t), target >= 1 and at most the whole weight;
// `above` gets weight(keys > t). entry(v, key, weight) says whether token v counts.
template <int THREADS, class Entry>
DEV u32 radix_select(RowSmem& sm, int vocab, u64 target, u64& above, Entry entry) {
    u32 prefix = 0;
    above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        sync_block();
        for (int b = threadIdx.x; b < kBins; b += THREADS) sm.low[b] = 0, sm.high[b] = 0;
        sync_block();
        for (int v = threadIdx.x; v < vocab; v += THREADS) {
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

// The least n with n * each >= want >= 1, n at most 2^18: a division of 64 bits would be a call, with its registers.
DEV u64 times_to_reach(u64 want, u64 each) {
    u64 n = 0;
#pragma unroll 1
    for (u64 step = 1ull << 17; step; step >>= 1)
        if ((n + step) * each < want) n += step;
    return n + 1;
}

// Argmax of a row; false where no distribution is: a NaN, a +inf, or nothing finite.
template <int THREADS>
DEV bool find_top(gptr<const float> l, int vocab, int& argmax, float& top) {
    Best mine{0, 0};
    u32 bad = 0;
    for (int v = threadIdx.x; v < vocab; v += THREADS) {
        const float x = l[v];
        if (!(x == x)) bad = 1;
        mine.offer(order_key(x), v);
    }
    bad = block_max<THREADS>(bad);
    argmax = (int)block_best<THREADS>(mine).id;
    top = l[argmax];
    return !bad && fabsf(top) <= kLargest;
}

// How a row is drawn: see pack_params in ds4/engine/ops/sample.py.
struct Settings {
    float inv_t, top_p, min_p;
    int top_k;
    bool greedy;
};

DEV Settings read_settings(gptr<const i32> params, i64 row, float top) {
    Settings s;
    const float t = __uint_as_float((u32)params[row * 8]);
    s.top_k = params[row * 8 + 1];
    s.top_p = __uint_as_float((u32)params[row * 8 + 2]);
    s.min_p = __uint_as_float((u32)params[row * 8 + 3]);
    s.inv_t = t > 0.0f ? 1.0f / t : 1.0f;
    s.greedy = !(t > 0.0f) || !(fabsf(top * s.inv_t) <= kLargest);  // so cold that the top's z is no number
    return s;
}

// A truncated set: keys above `cut`, those equal to it with an id up to `last_id`, and of these the likely enough.
struct Kept {
    float inv_t, z_top, min_p;
    int argmax;
    u32 cut, last_id;
    DEV u32 key(float x) const { return order_key(x * inv_t); }
    DEV float weigh(float x) const { return exp_f(x * inv_t - z_top); }
    DEV u64 mass(float x) const { return (u64)(weigh(x) * kMassOne); }
    DEV bool has(int v, float x) const {
        const u32 k = key(x);
        if (k < cut || (k == cut && (u32)v > last_id)) return false;
        return v == argmax || !(min_p > 0.0f) || !(weigh(x) < min_p);
    }
};

// All of a row's tokens, untempered.
DEV Kept whole_row(int argmax, float top) { return {1.0f, top, 0.0f, argmax, 0u, 0xffffffffu}; }

template <int THREADS>
DEV Kept truncate_row(RowSmem& sm, gptr<const float> l, int vocab, const Settings& s, int argmax, float top) {
    if (s.greedy) return {1.0f, top, 0.0f, argmax, order_key(top), (u32)argmax};
    Kept kept{s.inv_t, top * s.inv_t, s.min_p, argmax, 0u, 0xffffffffu};
    u64 ties = ~0ull, above = 0;  // how many of the tokens at the cut stay
    if (s.top_k > 0 && s.top_k < vocab) {
        kept.cut = radix_select<THREADS>(sm, vocab, (u64)s.top_k, above, [=](int v, u32& key, u64& weight) {
            key = kept.key(l[v]);
            weight = 1;
            return true;
        });
        ties = (u64)s.top_k - above;
    }
    if (s.top_p < 1.0f) {
        const u32 cut = kept.cut;
        u64 mine = 0;
        u32 equal = 0, at_cut = 0;
        for (int v = threadIdx.x; v < vocab; v += THREADS) {
            const float x = l[v];
            const u32 key = kept.key(x);
            if (key > cut) mine += kept.mass(x);
            if (key == cut) equal++, at_cut = max(at_cut, (u32)v + 1u);
        }
        u64 mass = block_sum_u64<THREADS>(mine);
        equal = block_sum<THREADS>(equal);
        at_cut = block_max<THREADS>(at_cut);
        if (at_cut) mass += min(ties, (u64)equal) * kept.mass(l[at_cut - 1u]);
        const u64 want = (u64)((double)s.top_p * (double)mass);
        const u64 target = want < 1 ? 1 : want;
        u64 higher;
        const u32 at = radix_select<THREADS>(sm, vocab, target, higher, [=](int v, u32& key, u64& weight) {
            const float x = l[v];
            key = kept.key(x);
            weight = kept.mass(x);
            return key >= cut;
        });
        u32 one = 0;
        for (int v = threadIdx.x; v < vocab; v += THREADS)
            if (kept.key(l[v]) == at) one = (u32)v + 1u;
        one = block_max<THREADS>(one);
        const u64 each = one ? kept.mass(l[one - 1u]) : 0;
        const u64 needed = each ? times_to_reach(target - higher, each) : 1;
        ties = at == cut ? min(ties, needed) : needed;
        kept.cut = at;
    }
    const u32 cut = kept.cut;
    u32 equal = 0;
    for (int v = threadIdx.x; v < vocab; v += THREADS) equal += kept.key(l[v]) == cut;
    equal = block_sum<THREADS>(equal);
    if (ties < equal) {  // uniform: cut among equals by id, lowest first
        u64 skipped;
        kept.last_id = ~radix_select<THREADS>(sm, vocab, ties, skipped, [=](int v, u32& key, u64& weight) {
            key = ~(u32)v;
            weight = 1;
            return kept.key(l[v]) == cut;
        });
    }
    return kept;
}

// Log-probability of `token` under the row, untempered and whole.
template <int THREADS>
DEV float log_probability(gptr<const float> l, int vocab, int argmax, float top, int token) {
    const Kept all = whole_row(argmax, top);
    u64 mass = 0;
    for (int v = threadIdx.x; v < vocab; v += THREADS) mass += all.mass(l[v]);
    const float total = (float)block_sum_u64<THREADS>(mass) * (1.0f / kMassOne);
    return l[token] - top - log_f(total);
}

struct Words4 {
    u32 w[4];
};

// Philox4x32-10 at the counter (c0, c1, c2, 0)
DEV Words4 philox(u32 key0, u32 key1, u32 c0, u32 c1, u32 c2) {
    u32 c[4] = {c0, c1, c2, 0};
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

// What the noise of a row depends on.
struct Noise {
    u32 seed0, seed1, at;
    DEV Noise(gptr<const i32> params, gptr<const i32> pos, i64 row)
        : seed0((u32)params[row * 8 + 4]), seed1((u32)params[row * 8 + 5]), at((u32)pos[row] + 1u) {}
    DEV Words4 words(u32 counter, u32 stream) const { return philox(seed0, seed1, counter, at, stream); }
};

DEV u32 row_stream(gptr<const i32> params, i64 row) { return (u32)params[row * 8 + 6]; }

// Uniform in (0, 1) from 32 random bits; small values, the tail that wins, keep their resolution
DEV float uniform(u32 bits) { return fminf(((float)bits + 0.5f) * 0x1p-32f, 0x1.fffffep-1f); }

// Gumbel noise: -log(E), E = -log(1 - uniform)
DEV float gumbel(u32 bits) { return -log_f(-log1p_f(-uniform(bits))); }

// Offers score(v) + Gumbel noise of every token: score gives false for tokens that do not take part.
template <int THREADS, class Score>
DEV Best draw(const Noise& n, u32 stream, int vocab, Score score) {
    Best mine{0, 0};
    for (int v0 = threadIdx.x * 4; v0 < vocab; v0 += THREADS * 4) {
        const Words4 noise = n.words((u32)v0 / 4, stream);
#pragma unroll 1  // four scores at once would not fit the registers
        for (int i = 0; i < 4; i++) {
            const u32 bits = i < 2 ? (i ? noise.w[1] : noise.w[0]) : (i == 2 ? noise.w[2] : noise.w[3]);
            float z;
            if (v0 + i < vocab && score(v0 + i, z)) mine.offer(order_key(z + gumbel(bits)), v0 + i);
        }
    }
    return block_best<THREADS>(mine);
}

// A row without a distribution: the host sees -1.
DEV void refuse_row(gptr<i32> out, i64 row) {
    out[row * 4] = -1;
    for (int i = 1; i < 4; i++) out[row * 4 + i] = 0;
}
