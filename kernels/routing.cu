//! Routing of a mixture of experts: CUDA form of src/ops/routing. A warp has a token's logits in registers, a lane each chosen expert; pairs are sorted
//! by expert without atomics: warps, blocks and lanes have runs of pairs in order, and each knows what those before it have.

#include "common.cuh"

using namespace tandem;

namespace {

constexpr uint32_t FULL = 0xffffffffu;

/// Warps of a block, each with a row.
constexpr int WARPS = 8;

/// What an expert that was chosen has for a key, and one that is not there: below every logit's.
constexpr uint32_t TAKEN = 0;

/// Orders logits as numbers: −0 as 0, NaN below all.
__device__ __forceinline__ uint32_t order(float x) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return TAKEN + 1;
    if (bits << 1 == 0) return 0x80000000u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/// The row of this warp.
__device__ __forceinline__ int warp_row() { return blockIdx.x * WARPS + threadIdx.x / WARP; }

/// Softmax over the `num_experts` logits of a row: lane l has those of l, l + 32 …, and 0 for those that are not there.
template <int N>
__device__ __forceinline__ void softmax(const float* row, int num_experts, float (&p)[N]) {
    const int lane = threadIdx.x % WARP;
    float most = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        p[i] = lane + i * WARP < num_experts ? row[lane + i * WARP] : -INFINITY;
        most = fmaxf(most, p[i]);
    }
    most = warp_max(most);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        p[i] = lane + i * WARP < num_experts ? __expf(p[i] - most) : 0.0f;
        sum += p[i];
    }
    const float scale = 1.0f / warp_sum(sum);
#pragma unroll
    for (int i = 0; i < N; ++i) p[i] *= scale;
}

template <int N>
__device__ __forceinline__ void choose(const float* logits, int* experts, float* weights, int tokens, int num_experts, int k, int all,
                                       int given) {
    const int lane = threadIdx.x % WARP, t = warp_row();
    if (t >= tokens) return;
    const float* row = logits + int64_t(t) * num_experts;
    const bool mine = lane < k;
    const int64_t pair = int64_t(t) * k + lane;
    int chosen = 0;
    if (given) {
        if (mine) chosen = experts[pair];
    } else {
        uint32_t keys[N];
#pragma unroll
        for (int i = 0; i < N; ++i) keys[i] = lane + i * WARP < num_experts ? order(row[lane + i * WARP]) : TAKEN;
        for (int j = 0; j < k; ++j) {
            uint32_t best = TAKEN, at = FULL;
            // A lane's experts rise, so the first of equal ones stays.
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (keys[i] > best) {
                    best = keys[i];
                    at = lane + i * WARP;
                }
            }
            const uint32_t top = __reduce_max_sync(FULL, best);
            const uint32_t expert = __reduce_min_sync(FULL, best == top ? at : FULL);
            if (lane == j) chosen = int(expert);
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (expert == lane + i * WARP) keys[i] = TAKEN;
        }
        if (mine) experts[pair] = chosen;
    }
    const float z = mine ? row[chosen] : -INFINITY;
    float most, sum;
    if (all) {
        float of_row[N];
        most = -INFINITY;
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            of_row[i] = lane + i * WARP < num_experts ? row[lane + i * WARP] : -INFINITY;
            most = fmaxf(most, of_row[i]);
        }
        most = warp_max(most);
#pragma unroll
        for (int i = 0; i < N; ++i) sum += lane + i * WARP < num_experts ? __expf(of_row[i] - most) : 0.0f;
        sum = warp_sum(sum);
    } else {
        most = warp_max(z);
        sum = warp_sum(mine ? __expf(z - most) : 0.0f);
    }
    if (mine) weights[pair] = __expf(z - most) / sum;
}

/// The host keeps the same struct in src/ops/routing/mod.rs.
struct BackwardParams {
    const float* logits;
    const int* experts;
    const float* weights;
    const float* dweights;
    const float* bias_dots;  // or null
    const float* balance;    // or null
    const int* counted_at;   // or null: then `counted` says it
    bf16* dlogits;
    int64_t stride;
    int32_t tokens;
    int32_t num_experts;
    int32_t k;
    int32_t columns;
    int32_t counted;
    int32_t all;
};
static_assert(sizeof(BackwardParams) == 96, "the host's struct has 96 bytes");

/// The number of rows that count.
__device__ __forceinline__ int rows_that_count(const int* at, int rows) { return at == nullptr ? rows : min(rows, *at); }

template <int N>
__device__ __forceinline__ void backward(const BackwardParams& p) {
    const int lane = threadIdx.x % WARP, t = warp_row();
    if (t >= p.tokens) return;
    const bool mine = lane < p.k;
    const int64_t pair = int64_t(t) * p.k + lane, first = int64_t(t) * p.num_experts;
    int expert = -1;
    float weight = 0.0f, d = 0.0f;
    if (mine) {
        expert = p.experts[pair];
        weight = p.weights[pair];
        d = p.dweights[pair];
        if (p.bias_dots != nullptr) d += p.bias_dots[first + expert];
    }
    const float sum = warp_sum(weight * d);
    const float of_pair = weight * (d - sum);
    const bool balanced = p.balance != nullptr && t < rows_that_count(p.counted_at, p.counted);
    float probability[N], g[N], dz[N], mean = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) probability[i] = g[i] = 0.0f;
    if (balanced || p.all) softmax(p.logits + first, p.num_experts, probability);
    if (balanced) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            g[i] = lane + i * WARP < p.num_experts ? p.balance[lane + i * WARP] : 0.0f;
            mean += probability[i] * g[i];
        }
        mean = warp_sum(mean);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) dz[i] = p.all ? -probability[i] * sum : 0.0f;
    for (int j = 0; j < p.k; ++j) {
        const int chosen = __shfl_sync(FULL, expert, j);
        const float value = __shfl_sync(FULL, of_pair, j);
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (chosen == lane + i * WARP) dz[i] = value;
    }
    bf16* const to = p.dlogits + int64_t(t) * p.stride;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int column = lane + i * WARP;
        if (column < p.num_experts) to[column] = to_bf16(balanced ? dz[i] + probability[i] * (g[i] - mean) : dz[i]);
    }
    for (int column = p.num_experts + lane; column < p.columns; column += WARP) to[column] = to_bf16(0.0f);
}

/// Of the rows of this block: partials [gridDim.x, 2·E], the sums of the softmax (0 where they are not wanted) and the choices of each expert.
template <int N>
__device__ __forceinline__ void count(const float* logits, const int* experts, const int* rows_at, float* partials, int rows,
                                      int num_experts, int k, int wanted) {
    __shared__ float sums_of[WARPS][N * WARP];
    __shared__ int counts_of[WARPS][N * WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int last = rows_that_count(rows_at, rows);
    float sums[N];
    int counts[N];
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = 0.0f, counts[i] = 0;
    for (int t = warp_row(); t < last; t += gridDim.x * WARPS) {
        if (wanted) {
            float p[N];
            softmax(logits + int64_t(t) * num_experts, num_experts, p);
#pragma unroll
            for (int i = 0; i < N; ++i) sums[i] += p[i];
        }
        const int expert = lane < k ? experts[int64_t(t) * k + lane] : -1;
        for (int j = 0; j < k; ++j) {
            const int chosen = __shfl_sync(FULL, expert, j);
#pragma unroll
            for (int i = 0; i < N; ++i) counts[i] += chosen == lane + i * WARP;
        }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        sums_of[warp][lane + i * WARP] = sums[i];
        counts_of[warp][lane + i * WARP] = counts[i];
    }
    __syncthreads();
    float* const to = partials + int64_t(blockIdx.x) * 2 * num_experts;
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
        float sum = 0.0f;
        int number = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += sums_of[w][e], number += counts_of[w][e];
        to[e] = sum;
        to[num_experts + e] = float(number);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Sorting. A block has a run of `each` pairs, a warp of it a run of them in whole groups of 32, and goes through it a group at a time.

constexpr int SORT_THREADS = 512;
constexpr int SORT_WARPS = SORT_THREADS / WARP;
constexpr int MAX_EXPERTS = 256;

/// The pairs first..last of this warp.
struct WarpRun {
    int first, last;
    __device__ __forceinline__ WarpRun(int pairs, int each) {
        const int block_first = min(int(blockIdx.x) * each, pairs), block_last = min(block_first + each, pairs);
        const int run = (each + SORT_THREADS - 1) / SORT_THREADS * WARP;
        first = min(block_first + int(threadIdx.x / WARP) * run, block_last);
        last = min(first + run, block_last);
    }
};

/// Adds the pairs of this warp to its `counts`, one for each expert. Lanes with the same expert are added by the first of them.
__device__ __forceinline__ void count_run(const int* experts, const WarpRun& run, int* counts) {
    const int lane = threadIdx.x % WARP;
    for (int base = run.first; base < run.last; base += WARP) {
        const int pair = base + lane, expert = pair < run.last ? experts[pair] : -1;
        const uint32_t same = __match_any_sync(FULL, expert);
        if (expert >= 0 && __ffs(same) - 1 == lane) counts[expert] += __popc(same);
        __syncwarp();
    }
}

/// Counts of all warps of a block.
__device__ __forceinline__ void count_warps(const int* experts, const WarpRun& run, int (*counts)[MAX_EXPERTS], int num_experts) {
    int* const mine = counts[threadIdx.x / WARP];
    for (int e = threadIdx.x % WARP; e < num_experts; e += WARP) mine[e] = 0;
    __syncwarp();
    count_run(experts, run, mine);
    __syncthreads();
}

/// Pairs of this warp's run that are `expert`'s.
__device__ __forceinline__ int count_one(const int* experts, const WarpRun& run, int expert) {
    const int lane = threadIdx.x % WARP;
    int number = 0;
    for (int base = run.first; base < run.last; base += WARP) {
        const int pair = base + lane;
        number += __popc(__ballot_sync(FULL, pair < run.last && experts[pair] == expert));
    }
    return number;
}

}  // namespace

/// logits [tokens, E] → experts [tokens, k] by falling logit (read where `given`) and weights [tokens, k]: softmax over `all` experts or over the chosen.
/// A warp a row. The number in a name is the most experts it takes.
extern "C" __global__ void __launch_bounds__(256) router_choose_32(const float* logits, int* experts, float* weights, int tokens,
                                                                   int num_experts, int k, int all, int given) {
    choose<1>(logits, experts, weights, tokens, num_experts, k, all, given);
}

extern "C" __global__ void __launch_bounds__(256) router_choose_128(const float* logits, int* experts, float* weights, int tokens,
                                                                    int num_experts, int k, int all, int given) {
    choose<4>(logits, experts, weights, tokens, num_experts, k, all, given);
}

extern "C" __global__ void __launch_bounds__(256) router_choose_256(const float* logits, int* experts, float* weights, int tokens,
                                                                    int num_experts, int k, int all, int given) {
    choose<8>(logits, experts, weights, tokens, num_experts, k, all, given);
}

/// Gradient of the logits. A warp a row.
extern "C" __global__ void __launch_bounds__(256) router_backward_32(const __grid_constant__ BackwardParams p) { backward<1>(p); }

extern "C" __global__ void __launch_bounds__(256) router_backward_128(const __grid_constant__ BackwardParams p) { backward<4>(p); }

extern "C" __global__ void __launch_bounds__(256) router_backward_256(const __grid_constant__ BackwardParams p) { backward<8>(p); }

/// The first stage of counting; the second is `router_add_counts`.
extern "C" __global__ void __launch_bounds__(256) router_count_32(const float* logits, const int* experts, const int* rows_at,
                                                                  float* partials, int rows, int num_experts, int k, int wanted) {
    count<1>(logits, experts, rows_at, partials, rows, num_experts, k, wanted);
}

extern "C" __global__ void __launch_bounds__(256) router_count_128(const float* logits, const int* experts, const int* rows_at,
                                                                   float* partials, int rows, int num_experts, int k, int wanted) {
    count<4>(logits, experts, rows_at, partials, rows, num_experts, k, wanted);
}

extern "C" __global__ void __launch_bounds__(256) router_count_256(const float* logits, const int* experts, const int* rows_at,
                                                                   float* partials, int rows, int num_experts, int k, int wanted) {
    count<8>(logits, experts, rows_at, partials, rows, num_experts, k, wanted);
}

/// probabilities [E] (or null) += Σ of the first halves of partials [blocks, 2·E], counts [E] += Σ of the second. A block an expert: the first warp has
/// its probability, the second its count.
extern "C" __global__ void __launch_bounds__(64) router_add_counts(const float* partials, float* probabilities, float* counts, int blocks,
                                                                   int num_experts) {
    const int lane = threadIdx.x % WARP, half = threadIdx.x / WARP;
    float* const to = half == 0 ? probabilities : counts;
    if (to == nullptr) return;
    float sum = 0.0f;
    for (int block = lane; block < blocks; block += WARP) sum += partials[(int64_t(block) * 2 + half) * num_experts + blockIdx.x];
    sum = warp_sum(sum);
    if (lane == 0) to[blockIdx.x] += sum;
}

/// histograms [gridDim.x, E]: how many of a block's pairs are each expert's.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) group_histograms(const int* experts, int* histograms, int pairs, int each,
                                                                            int num_experts) {
    __shared__ int counts[SORT_WARPS][MAX_EXPERTS];
    count_warps(experts, WarpRun(pairs, each), counts, num_experts);
    for (int e = threadIdx.x; e < num_experts; e += SORT_THREADS) {
        int sum = 0;
#pragma unroll
        for (int w = 0; w < SORT_WARPS; ++w) sum += counts[w][e];
        histograms[int64_t(blockIdx.x) * num_experts + e] = sum;
    }
}

/// The stable sort, from the histograms of all blocks: offsets [E + 1], source and place [pairs].
extern "C" __global__ void __launch_bounds__(SORT_THREADS) group_rows(const int* experts, const int* histograms, int* offsets, int* source,
                                                                      int* place, int pairs, int each, int num_experts) {
    // A warp's counts become the next row of each expert for it.
    __shared__ int counts[SORT_WARPS][MAX_EXPERTS];
    __shared__ int totals[SORT_THREADS], befores[SORT_THREADS];
    __shared__ int starts[MAX_EXPERTS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const WarpRun run(pairs, each);
    count_warps(experts, run, counts, num_experts);

    // Pairs of each expert in all blocks and in those before this one: some threads share an expert, each takes every parts-th block.
    int width = WARP;
    while (width < num_experts) width *= 2;
    const int parts = SORT_THREADS / width, column = threadIdx.x % width, part = threadIdx.x / width;
    int total = 0, before = 0;
    if (column < num_experts) {
#pragma unroll 4
        for (int block = part; block < gridDim.x; block += parts) {
            const int number = histograms[int64_t(block) * num_experts + column];
            total += number;
            before += block < blockIdx.x ? number : 0;
        }
    }
    totals[threadIdx.x] = total;
    befores[threadIdx.x] = before;
    __syncthreads();
    if (threadIdx.x < width) {
        for (int other = 1; other < parts; ++other) {
            total += totals[threadIdx.x + other * width];
            before += befores[threadIdx.x + other * width];
        }
        starts[threadIdx.x] = total;
    }
    __syncthreads();
    // The first row of each expert: one warp, a lane a run of width / 32 experts.
    if (warp == 0) {
        const int run_length = width / WARP, first = lane * run_length;
        int sum = 0;
        for (int i = 0; i < run_length; ++i) sum += starts[first + i];
        int running = sum;
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            const int below = __shfl_up_sync(FULL, running, offset);
            if (lane >= offset) running += below;
        }
        running -= sum;
        for (int i = 0; i < run_length; ++i) {
            const int number = starts[first + i];
            starts[first + i] = running;
            running += number;
        }
    }
    __syncthreads();
    if (threadIdx.x < num_experts) {
        const int start = starts[threadIdx.x];
        if (blockIdx.x == 0) {
            offsets[threadIdx.x] = start;
            if (threadIdx.x == 0) offsets[num_experts] = pairs;
        }
        int next = start + before;
#pragma unroll
        for (int w = 0; w < SORT_WARPS; ++w) {
            const int number = counts[w][threadIdx.x];
            counts[w][threadIdx.x] = next;
            next += number;
        }
    }
    __syncthreads();
    int* const next = counts[warp];
    for (int base = run.first; base < run.last; base += WARP) {
        const int pair = base + lane, expert = pair < run.last ? experts[pair] : -1;
        const uint32_t same = __match_any_sync(FULL, expert);
        const int rank = __popc(same & ((1u << lane) - 1));
        const int row = expert >= 0 ? next[expert] + rank : 0;
        __syncwarp();
        if (expert >= 0) {
            if (rank == 0) next[expert] += __popc(same);
            source[row] = pair;
            place[pair] = row;
        }
        __syncwarp();
    }
}

/// counts [gridDim.x]: how many of a block's pairs are `expert`'s.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) find_counts(const int* experts, int* counts, int pairs, int each, int expert) {
    __shared__ int of_warps[SORT_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int number = count_one(experts, WarpRun(pairs, each), expert);
    if (lane == 0) of_warps[warp] = number;
    __syncthreads();
    if (warp == 0) {
        const int sum = __reduce_add_sync(FULL, lane < SORT_WARPS ? of_warps[lane] : 0);
        if (lane == 0) counts[blockIdx.x] = sum;
    }
}

/// The pairs of `expert` in order: source from `first` on, their place, and how many there are, from the counts of all blocks.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) find_rows(const int* experts, const int* counts, int* source, int* place,
                                                                     int* found, int pairs, int each, int expert, int first) {
    __shared__ int of_warps[SORT_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const WarpRun run(pairs, each);
    const int number = count_one(experts, run, expert);
    if (lane == 0) of_warps[warp] = number;
    // Every warp adds up for itself what lies before it.
    int total = 0, row = 0;
    for (int block = lane; block < gridDim.x; block += WARP) {
        const int of_block = counts[block];
        total += of_block;
        row += block < blockIdx.x ? of_block : 0;
    }
    __syncthreads();
    row += lane < warp ? of_warps[lane] : 0;
    row = first + __reduce_add_sync(FULL, row);
    total = __reduce_add_sync(FULL, total);
    if (blockIdx.x == 0 && threadIdx.x == 0) found[0] = total;
    for (int base = run.first; base < run.last; base += WARP) {
        const int pair = base + lane;
        const bool is_found = pair < run.last && experts[pair] == expert;
        const uint32_t all = __ballot_sync(FULL, is_found);
        if (is_found) {
            const int to = row + __popc(all & ((1u << lane) - 1));
            source[to] = pair;
            place[pair] = to;
        }
        row += __popc(all);
    }
}

/// xs [count, width] = x[source[p] / k, :]. A warp a row, four vectors of a lane on their way at once.
extern "C" __global__ void __launch_bounds__(256) gather_experts(const bf16* x, const int* source, bf16* xs, int count, int width, int k,
                                                                 int64_t x_stride, int64_t xs_stride) {
    constexpr int AHEAD = 4;
    const int row = warp_row(), vectors = width / 8;
    if (row >= count) return;
    const Bf16x8* from = reinterpret_cast<const Bf16x8*>(x + int64_t(source[row] / k) * x_stride);
    Bf16x8* to = reinterpret_cast<Bf16x8*>(xs + int64_t(row) * xs_stride);
    for (int at = threadIdx.x % WARP; at < vectors; at += AHEAD * WARP) {
        Bf16x8 loaded[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (at + i * WARP < vectors) loaded[i] = from[at + i * WARP];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (at + i * WARP < vectors) to[at + i * WARP] = loaded[i];
    }
}

/// y[t] = residual[t] + Σ_j weights[t][j]·ys[place[t][j]]; `weights` and `residual` may be null. Grid: (tokens, runs of 128 vectors of a row).
extern "C" __global__ void __launch_bounds__(128) combine_experts(const bf16* ys, const int* place, const float* weights,
                                                                  const bf16* residual, bf16* y, int64_t ys_stride,
                                                                  int64_t residual_stride, int64_t y_stride, int width, int k) {
    constexpr int AHEAD = 4;
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (column >= width) return;
    const int64_t t = blockIdx.x, pair = t * k;
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
    if (residual != nullptr) reinterpret_cast<const Bf16x8*>(residual + t * residual_stride + column)->unpack(sum);
    for (int j = 0; j < k; j += AHEAD) {
        Bf16x8 loaded[AHEAD];
        float weight[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (j + i < k) {
                loaded[i] = *reinterpret_cast<const Bf16x8*>(ys + int64_t(place[pair + j + i]) * ys_stride + column);
                weight[i] = weights == nullptr ? 1.0f : weights[pair + j + i];
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (j + i < k) {
                float v[8];
                loaded[i].unpack(v);
#pragma unroll
                for (int c = 0; c < 8; ++c) sum[c] += weight[i] * v[c];
            }
        }
    }
    Bf16x8 packed;
    packed.pack(sum);
    *reinterpret_cast<Bf16x8*>(y + t * y_stride + column) = packed;
}
