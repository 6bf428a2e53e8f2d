#include "kernel_body.h"
#include "simd_avx2.h"

constinit const neoflex::Kernel neoflex::avx2_kernel = neoflex::make_kernel<neoflex::Avx2>("avx2");
