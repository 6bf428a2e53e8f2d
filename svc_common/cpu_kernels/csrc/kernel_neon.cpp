#include "kernel_body.h"
#include "simd_neon.h"

constinit const neoflex::Kernel neoflex::neon_kernel = neoflex::make_kernel<neoflex::Neon>("neon");
