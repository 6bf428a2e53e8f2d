#include "linear_body.h"
#include "simd_scalar.h"

namespace neoflex {
namespace {

struct LinearScalar : Scalar {
    static constexpr int tile_rows = 1;
    static constexpr int panel_columns = 16;
    static constexpr bool rounds_rows = false;

    static Vec load_first(const BFloat* pair) { return to_float(pair[0]); }
    static Vec load_second(const BFloat* pair) { return to_float(pair[1]); }
};

}  // namespace
}  // namespace neoflex

constinit const neoflex::LinearKernel neoflex::scalar_linear_kernel =
    neoflex::make_linear_kernel<neoflex::LinearScalar>("scalar");
