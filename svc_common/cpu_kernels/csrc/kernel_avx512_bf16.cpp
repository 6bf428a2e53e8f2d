#include "kernel_body.h"
#include "simd_avx512_bf16.h"

constinit const neoflex::Kernel neoflex::avx512_bf16_kernel = neoflex::make_kernel<neoflex::Avx512BFloat>("avx512_bf16");
