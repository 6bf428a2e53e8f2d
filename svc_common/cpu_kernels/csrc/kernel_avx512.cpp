#include "kernel_body.h"
#include "simd_avx512.h"

constinit const neoflex::Kernel neoflex::avx512_kernel = neoflex::make_kernel<neoflex::Avx512>("avx512");
