#include "kernel_body.h"
#include "simd_scalar.h"

constinit const neoflex::Kernel neoflex::scalar_kernel = neoflex::make_kernel<neoflex::Scalar>("scalar");
