//! Boundaries, positions and masks of a packed batch, one operation after another: CUDA form of src/ops/sequence.rs.

#include "common.cuh"

using namespace tandem;

constexpr int THREADS = 1024;

/// cu_seqlens [n + 1]: 0, then the running sums of lengths [n]. One block; each thread has a run of neighbours.
extern "C" __global__ void __launch_bounds__(THREADS) cumulative_lengths(const int* lengths, int* cu_seqlens, int n) {
    __shared__ int sums[THREADS];
    const int each = (n + THREADS - 1) / THREADS, first = min(static_cast<int>(threadIdx.x) * each, n), last = min(first + each, n);
    int sum = 0;
    for (int i = first; i < last; ++i) sum += lengths[i];
    sums[threadIdx.x] = sum;
    for (int offset = 1; offset < THREADS; offset *= 2) {
        __syncthreads();
        const int before = threadIdx.x >= offset ? sums[threadIdx.x - offset] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
    }
    int running = sums[threadIdx.x] - sum;
    if (threadIdx.x == 0) cu_seqlens[0] = 0;
    for (int i = first; i < last; ++i) {
        running += lengths[i];
        cu_seqlens[i + 1] = running;
    }
}

/// out[0] = the greatest of lengths [n], at least 0. One block.
extern "C" __global__ void __launch_bounds__(THREADS) longest(const int* lengths, int* out, int n) {
    __shared__ int most[THREADS];
    int x = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) x = max(x, lengths[i]);
    most[threadIdx.x] = x;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) most[threadIdx.x] = max(most[threadIdx.x], most[threadIdx.x + half]);
    }
    if (threadIdx.x == 0) out[0] = most[0];
}

/// positions [tokens]: how far each token is behind the first of its document; cu_seqlens [documents + 1].
extern "C" __global__ void __launch_bounds__(256) document_positions(const int* cu_seqlens, int* positions, int documents, int tokens) {
    const int token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= tokens) return;
    // The last document that starts at or before the token.
    int low = 0, high = documents;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (cu_seqlens[middle] <= token) low = middle;
        else high = middle;
    }
    positions[token] = token - cu_seqlens[low];
}

/// Lets the rows of one document see its keys up to themselves, in a mask [·, stride] u32 of zeros (bits as in attention_mask.cu).
/// Grid: rows by blockIdx.x, which has room for any number of them; a thread a word that the document touches.
extern "C" __global__ void __launch_bounds__(128) mask_document(uint32_t* mask, int start, int end, int stride) {
    const int row = start + blockIdx.x, word = start / 32 + blockIdx.y * blockDim.x + threadIdx.x;
    if (word * 32 > row) return;
    const int from = max(start - word * 32, 0), to = min(row + 1 - word * 32, 32);
    const uint32_t below = to == 32 ? 0xffffffffu : (1u << to) - 1;
    mask[static_cast<int64_t>(row) * stride + word] = below & ~((1u << from) - 1);
}

/// Hides what lies `window` or more keys behind a row. Grid: rows by blockIdx.x; a thread a word.
extern "C" __global__ void __launch_bounds__(128) mask_window(uint32_t* mask, int stride, int window) {
    const int row = blockIdx.x, word = blockIdx.y * blockDim.x + threadIdx.x;
    const int first = row + 1 - window - word * 32;
    if (word >= stride || first <= 0) return;
    mask[static_cast<int64_t>(row) * stride + word] &= first >= 32 ? 0u : ~((1u << first) - 1);
}
