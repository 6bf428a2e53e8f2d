// The linear kernels' part of the extension _kernels.
#pragma once

#include <nanobind/nanobind.h>

namespace neoflex {

void bind_linear(nanobind::module_& m);
void bind_decoder(nanobind::module_& m);

}  // namespace neoflex
