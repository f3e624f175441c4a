//! PTX of the attention kernels that `common.cuh` does not hold: the fast exponential, short asynchronous copies, ldmatrix from an
//! address.
#pragma once

#include "common.cuh"

namespace tandem {

/// 2^x; 0 for −∞, at most 2 ulp off elsewhere.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// Copies BYTES (4 or 8) from global to shared memory without a register; writes zeros when `valid` is false.
template <int BYTES>
__device__ __forceinline__ void cp_async_short(void* shared, const void* global, bool valid) {
    const int bytes = valid ? BYTES : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(shared_address(shared)), "l"(global), "n"(BYTES), "r"(bytes));
}

/// `ldmatrix_x4` from a shared-memory address.
__device__ __forceinline__ void ldmatrix_x4_at(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/// `ldmatrix_x4_trans` from a shared-memory address.
__device__ __forceinline__ void ldmatrix_x4_trans_at(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

}  // namespace tandem
