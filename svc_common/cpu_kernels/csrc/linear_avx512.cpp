#include "linear_avx512.h"

constinit const neoflex::LinearKernel neoflex::avx512_linear_kernel =
    neoflex::make_linear_kernel<neoflex::LinearAvx512>("avx512");
