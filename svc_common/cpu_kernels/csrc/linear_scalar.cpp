#include "linear_body.h"
#include "simd_scalar.h"

namespace neoflex {
namespace {

struct LinearScalar : Scalar {
    static constexpr int tile_rows = 1;
    static constexpr int integer_tile_rows = 1;
    static constexpr int panel_columns = 16;
    static constexpr bool rounds_rows = false;

    static Vec load_first(const BFloat* pair) { return to_float(pair[0]); }
    static Vec load_second(const BFloat* pair) { return to_float(pair[1]); }

    static Int16Pairs load_nibbles(const std::uint8_t* from) { return from[0] | std::uint32_t{from[1]} << 16; }
    static Int16Pairs lower_nibbles(Int16Pairs words) { return words & 0x000f000fu; }
    static Int16Pairs upper_nibbles(Int16Pairs words) { return words >> 4 & 0x000f000fu; }
};

}  // namespace
}  // namespace neoflex

constinit const neoflex::LinearKernel neoflex::scalar_linear_kernel =
    neoflex::make_linear_kernel<neoflex::LinearScalar>("scalar");
